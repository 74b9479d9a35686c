#!/bin/busybox sh
# The guest's first process: mounts the host's files, makes a SoftRoCE device, runs the
# job, leaves its exit status in the results share and powers off.

/bin/busybox --install -s /bin
export PATH=/bin:/sbin:/usr/sbin:/usr/bin

die() { echo "init: $*" > /dev/console; poweroff -f; }

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
for module in /modules/*; do insmod "$module" || echo "no $module"; done

share=trans=virtio,version=9p2000.L,msize=262144
mount -t 9p -o $share,ro,cache=loose host /host || die "no host files"
mount -t 9p -o $share,cache=none results /results || die "no results share"

# What the guest writes stays in its memory.
mount -t tmpfs -o size=3g tmpfs /new
mkdir /new/upper /new/work /new/root
mount -t overlay -o lowerdir=/host,upperdir=/new/upper,workdir=/new/work overlay \
    /new/root || die "no overlay"
root=/new/root
for folder in proc sys dev; do mount --bind /$folder $root/$folder; done
mkdir -p $root/dev/shm $root/mnt /dev/pts
mount -t tmpfs -o mode=1777 tmpfs $root/dev/shm
mount -t devpts devpts $root/dev/pts
mount --bind /results $root/mnt

hostname localhost
ip link set lo up
ulimit -l unlimited
# A packet holds 4096 bytes of payload. Linux wakes the proxies of many ranks in turn,
# not by session.
echo 0 > /proc/sys/kernel/sched_autogroup_enabled
chroot $root /bin/sh -e -c '
    ip link set dummy0 mtu 4200
    ip address add 192.0.2.1/24 dev dummy0
    ip link set dummy0 up
    rdma link add rxe0 type rxe netdev dummy0
' || die "no rxe0"

touch /results/started
chroot $root /bin/sh /mnt/job > /results/output 2>&1
echo $? > /results/status
sync
poweroff -f
