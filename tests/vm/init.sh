#!/bin/bash
# First process of a guest's root: mounts, climbs the rungs in /tree, sends /out as a tar to the second disk, switches off.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 TMPDIR=/tmp
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/tree
mount -t proc proc /proc
mount -t sysfs sys /sys
mountpoint -q /dev || mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts pts /dev/pts
mount -t tmpfs shm /dev/shm
ln -sf /proc/self/fd /dev/fd
ln -sf fd/0 /dev/stdin
ln -sf fd/1 /dev/stdout
ln -sf fd/2 /dev/stderr
chmod 1777 /tmp
busybox ip link set lo up
busybox sysctl -qw kernel.printk="3 4 1 3"
mount -o noatime /dev/vdc /tree
cd /tree
python3 -m tests.vm.rungs $(cat /run/rungs) < /dev/null
tar -C /out -cf - . | dd of=/dev/vdb bs=1M conv=fsync status=none
sync
echo 1 > /proc/sys/kernel/sysrq
echo o > /proc/sysrq-trigger
sleep 5
echo b > /proc/sysrq-trigger
sleep 100
