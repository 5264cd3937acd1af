#!/bin/sh
# The first process of a kernel that is tried: mounts what it needs, runs a few tests, and powers off. What it is told stands in
# the kernel's command line: the directory of the kernel's modules, and the file with what is to be run.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev 2>/dev/null
mkdir -p /dev/pts /dev/shm /dev/net
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
for word in $(cat /proc/cmdline); do
    case $word in
        dibs.modules=*) modules=${word#*=} ;;
        dibs.run=*) run=${word#*=} ;;
        dibs.iptables=*) iptables=${word#*=} ;;
    esac
done
mkdir -p /run/modules /run/tmp
export TMPDIR=/run/tmp
if [ -d "$modules" ]; then
    mkdir -p /lib/modules
    mount --bind "$modules" /lib/modules
fi
# Where there is no nf_tables, the programs of that flavour are of no use.
if [ "$iptables" = legacy ] && [ -e /usr/sbin/xtables-legacy-multi ]; then
    mount --bind /usr/sbin/xtables-legacy-multi /usr/sbin/xtables-nft-multi
fi
for module in tun ipv6 veth sch_tbf; do
    modprobe -q $module
done
[ -e /dev/net/tun ] || mknod /dev/net/tun c 10 200
ip link set lo up
echo "dibs-kernel: $(uname -r)"
cd /
sh "$run"
echo "dibs-status: $?"
sync
echo o >/proc/sysrq-trigger
sleep 60
