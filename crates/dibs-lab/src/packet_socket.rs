//! Packet sockets (packet(7)): whole frames of one interface, many per system call.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

use anyhow::{Context as _, Result};

/// Frames per system call.
pub(crate) const BATCH: usize = 64;
/// The largest frame: an IP superpacket with its link-layer and virtio-net headers.
const SLOT: usize = 65536 + 64;
/// Bytes that the kernel may keep for us, by its own generous counting.
const BUFFER: libc::c_int = 256 << 20;

/// A packet socket bound to one interface.
#[derive(Debug)]
pub(crate) struct PacketSocket {
    fd: OwnedFd,
}

impl PacketSocket {
    /// Opens one in the calling thread's network namespace. For a forwarder, frames carry a
    /// virtio-net header and those that we send are not received; otherwise both directions are
    /// seen as they are.
    pub(crate) fn open(interface: &str, forwarder: bool) -> Result<Self> {
        Self::try_open(interface, forwarder)
            .with_context(|| format!("packet socket on {interface}"))
    }

    fn try_open(interface: &str, forwarder: bool) -> io::Result<Self> {
        let index = nix::net::if_::if_nametoindex(interface)?;
        // Protocol 0: nothing is received before the bind below names the interface.
        // SAFETY: no pointers.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and nobody else's.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let socket = Self { fd };
        if forwarder {
            socket.set(libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)?;
            socket.set(libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1)?;
            socket.set(libc::SOL_PACKET, libc::PACKET_QDISC_BYPASS, 1)?;
        }
        socket.set(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, BUFFER)?;
        // SAFETY: all zero is a valid sockaddr_ll.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
        address.sll_ifindex = index as i32;
        let len = size_of_val(&address) as libc::socklen_t;
        // SAFETY: the address is initialised and of the length given.
        check(unsafe { libc::bind(socket.raw(), (&raw const address).cast(), len) })?;
        Ok(socket)
    }

    fn set(&self, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
        let len = size_of_val(&value) as libc::socklen_t;
        // SAFETY: the value is of the length given.
        check(unsafe {
            libc::setsockopt(self.raw(), level, option, (&raw const value).cast(), len)
        })?;
        Ok(())
    }

    /// Receives what is there, up to a batch, without waiting; returns how many frames.
    pub(crate) fn receive(&self, into: &mut Receiver) -> usize {
        // SAFETY: all zero is a valid value of these three types.
        let (mut messages, mut vectors): ([libc::mmsghdr; BATCH], [libc::iovec; BATCH]) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        for n in 0..BATCH {
            vectors[n].iov_base = into.slots[n * SLOT..].as_mut_ptr().cast();
            vectors[n].iov_len = SLOT;
            let header = &mut messages[n].msg_hdr;
            header.msg_iov = &raw mut vectors[n];
            header.msg_iovlen = 1;
            header.msg_name = (&raw mut into.addresses[n]).cast();
            header.msg_namelen = size_of::<libc::sockaddr_ll>() as u32;
        }
        // SAFETY: each vector points at SLOT writable bytes, each name at a whole sockaddr_ll.
        let received = unsafe {
            libc::recvmmsg(
                self.raw(),
                messages.as_mut_ptr(),
                BATCH as u32,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
            )
        };
        // Nothing there, or the interface went down (reported once): either way, no frames.
        into.count = received.max(0) as usize;
        for (len, message) in into.lengths.iter_mut().zip(&messages[..into.count]) {
            *len = message.msg_len as usize;
        }
        into.count
    }

    /// Sends frames without waiting, and reports for each whether the interface took it.
    pub(crate) fn send(&self, frames: &[Vec<u8>], mut report: impl FnMut(&[u8], bool)) {
        // SAFETY: all zero is a valid value of these three types.
        let (mut messages, mut vectors): ([libc::mmsghdr; BATCH], [libc::iovec; BATCH]) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        for frames in frames.chunks(BATCH) {
            for (n, frame) in frames.iter().enumerate() {
                vectors[n].iov_base = frame.as_ptr().cast_mut().cast();
                vectors[n].iov_len = frame.len();
                messages[n].msg_hdr.msg_iov = &raw mut vectors[n];
                messages[n].msg_hdr.msg_iovlen = 1;
            }
            let mut done = 0;
            while done < frames.len() {
                let rest = &mut messages[done..frames.len()];
                // SAFETY: each vector points at a frame that outlives the call, which only reads.
                let sent = unsafe {
                    libc::sendmmsg(
                        self.raw(),
                        rest.as_mut_ptr(),
                        rest.len() as u32,
                        libc::MSG_DONTWAIT,
                    )
                };
                let taken = sent.max(0) as usize;
                frames[done..done + taken]
                    .iter()
                    .for_each(|frame| report(frame, true));
                done += taken;
                if sent <= 0 {
                    report(&frames[done], false);
                    done += 1;
                }
            }
        }
    }

    /// Frames that the kernel dropped for lack of buffer since the last call.
    pub(crate) fn missed(&self) -> io::Result<u64> {
        // SAFETY: all zero is a valid tpacket_stats.
        let mut stats: libc::tpacket_stats = unsafe { std::mem::zeroed() };
        let mut len = size_of_val(&stats) as libc::socklen_t;
        // SAFETY: the destination is writable for the length given.
        check(unsafe {
            libc::getsockopt(
                self.raw(),
                libc::SOL_PACKET,
                libc::PACKET_STATISTICS,
                (&raw mut stats).cast(),
                &mut len,
            )
        })?;
        Ok(u64::from(stats.tp_drops))
    }

    fn raw(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Room for a batch of frames.
pub(crate) struct Receiver {
    slots: Vec<u8>,
    addresses: [libc::sockaddr_ll; BATCH],
    lengths: [usize; BATCH],
    count: usize,
}

impl Receiver {
    pub(crate) fn new() -> Self {
        // SAFETY: all zero is a valid sockaddr_ll.
        let addresses = unsafe { std::mem::zeroed() };
        Self {
            slots: vec![0; BATCH * SLOT],
            addresses,
            lengths: [0; BATCH],
            count: 0,
        }
    }

    /// The frames of the last batch.
    pub(crate) fn frames(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.count).map(|n| &self.slots[n * SLOT..][..self.lengths[n]])
    }

    /// Of each frame of the last batch, whether this host sent it.
    pub(crate) fn outgoing(&self) -> impl Iterator<Item = bool> {
        let addresses = &self.addresses[..self.count];
        addresses
            .iter()
            .map(|address| address.sll_pkttype == libc::PACKET_OUTGOING)
    }
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}
