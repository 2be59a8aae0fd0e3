#!/bin/busybox sh
# First process of a guest: loads the modules that its disks need, and goes on in the root on the first disk.
B=/bin/busybox
$B mount -t devtmpfs dev /dev
$B mount -t proc proc /proc
# Modules need each other in an order that changes between kernels: try until all are in.
for turn in 1 2 3; do
	for module in /lib/*.ko; do
		$B insmod "$module" 2> /dev/null
	done
done
n=0
while [ ! -b /dev/vda ] && [ $n -lt 50 ]; do
	$B sleep 0.2
	n=$((n + 1))
done
$B mount -t ext4 -o rw,noatime /dev/vda /new
$B mount -t tmpfs run /new/run
$B cp /rungs /new/run/rungs
$B umount /proc
$B mount --move /dev /new/dev
exec $B switch_root /new /bin/bash /tree.init
