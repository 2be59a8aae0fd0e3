#!/bin/sh
# BCC looks for kernel headers in /lib/modules/<running kernel>. If the distribution has none for this kernel, the newest
# installed ones serve as well: MoEScope's programs read no kernel structure through headers (offsets come from the kernel's BTF).
set -eu
modules=/lib/modules/$(uname -r)
if [ -e "$modules/build" ]; then
	echo "kernel headers: $modules/build"
	exit 0
fi
arch=$(dpkg --print-architecture 2>/dev/null || echo amd64)
newest=$(ls -d /usr/src/linux-headers-*-"$arch" 2>/dev/null | sort -V | tail -n 1)
if [ -z "$newest" ]; then
	echo "kernel headers: none installed, --loader bcc will not work (default loader unaffected)"
	exit 0
fi
mkdir -p "$modules"
ln -s "$newest" "$modules/build"
ln -s "${newest%-"$arch"}-common" "$modules/source"
echo "kernel headers: linked $modules to $newest"
