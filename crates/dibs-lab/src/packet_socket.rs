//! Packet sockets (packet(7)): whole frames of one interface, read from a ring shared with the
//! kernel. The ring, unlike a socket's buffer, is as large as we want without privileges.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use nix::sys::socket::{setsockopt, sockopt};

/// Frames per system call when sending.
pub(crate) const BATCH: usize = 64;
/// What the kernel allocates at once.
const BLOCK: usize = 1 << 20;
/// Where the kernel puts the sender's address: behind the header, aligned to 16.
const ADDRESS: usize = size_of::<libc::tpacket2_hdr>().next_multiple_of(16);
/// Bytes that a forwarding socket may have sent without their being received.
const SENDING: usize = 32 << 20;
/// A slot for a superpacket.
const SUPERPACKET: usize = 65536 + 1024;
/// Room for what precedes a frame in its slot.
const OVERHEAD: usize = 128;

/// What a packet socket is for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Use {
    /// Frames carry a virtio-net header, and those that we send are not received. There is room for frames of
    /// this MTU, or for superpackets.
    Forward { mtu: u32, superpackets: bool },
    /// Both directions as they are, superpackets included.
    Listen,
    /// The same, of each frame only the beginning.
    ListenToHeads,
}

/// A packet socket bound to one interface.
#[derive(Debug)]
pub(crate) struct PacketSocket {
    fd: OwnedFd,
}

/// The socket's received frames. Only one thread reads them.
#[derive(Debug)]
pub(crate) struct Ring {
    memory: NonNull<u8>,
    slot: usize,
    blocks: usize,
    header: usize,
    head: usize,
}

// SAFETY: the mapping is this ring's alone, and the kernel's side is synchronised by each slot's
// status word.
unsafe impl Send for Ring {}

/// A received frame.
#[derive(Debug)]
pub(crate) struct Frame<'a> {
    /// When it came, since the epoch.
    pub(crate) at: Duration,
    /// Whether this host sent it.
    pub(crate) outgoing: bool,
    /// The frame, behind its virtio-net header if the socket forwards; cut at the slot's end.
    pub(crate) bytes: &'a [u8],
}

impl PacketSocket {
    /// Opens one in the calling thread's network namespace.
    pub(crate) fn open(interface: &str, purpose: Use) -> Result<(Self, Ring)> {
        Self::try_open(interface, purpose).with_context(|| format!("packet socket on {interface}"))
    }

    fn try_open(interface: &str, purpose: Use) -> io::Result<(Self, Ring)> {
        let index = nix::net::if_::if_nametoindex(interface)?;
        // Protocol 0: nothing is received before the bind below names the interface.
        // SAFETY: no pointers.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        check(fd)?;
        // SAFETY: the descriptor is new and nobody else's.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let socket = Self { fd };
        socket.set(
            libc::PACKET_VERSION,
            libc::tpacket_versions::TPACKET_V2 as libc::c_int,
        )?;
        let ring = match purpose {
            Use::Forward { mtu, superpackets } => {
                for option in [
                    libc::PACKET_VNET_HDR,
                    libc::PACKET_IGNORE_OUTGOING,
                    libc::PACKET_QDISC_BYPASS,
                ] {
                    socket.set(option, 1)?;
                }
                // What we send counts as ours until it is received, by another processor perhaps.
                // Users other than root get what the system lets them have.
                if setsockopt(&socket.fd, sockopt::SndBufForce, &SENDING).is_err() {
                    setsockopt(&socket.fd, sockopt::SndBuf, &SENDING)?;
                }
                let slot = (mtu as usize + OVERHEAD).next_power_of_two().max(2048);
                let (slot, blocks) = match superpackets {
                    true => (SUPERPACKET, 64),
                    false => (slot, 16.max(4 * slot / 2048)),
                };
                Ring::new(&socket, slot, blocks, crate::wire::HEADER)?
            }
            Use::Listen => Ring::new(&socket, SUPERPACKET, 128, 0)?,
            Use::ListenToHeads => Ring::new(&socket, 512, 32, 0)?,
        };
        // SAFETY: all zero is a valid sockaddr_ll.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
        address.sll_ifindex = index as i32;
        let len = size_of_val(&address) as libc::socklen_t;
        // SAFETY: the address is initialised and of the length given.
        check(unsafe { libc::bind(socket.raw(), (&raw const address).cast(), len) })?;
        Ok((socket, ring))
    }

    /// Sets an option whose value is an integer or a structure of integers.
    fn set<T>(&self, option: libc::c_int, value: T) -> io::Result<()> {
        let len = size_of::<T>() as libc::socklen_t;
        let value = (&raw const value).cast();
        // SAFETY: the value is of the length given.
        check(unsafe { libc::setsockopt(self.raw(), libc::SOL_PACKET, option, value, len) })?;
        Ok(())
    }

    /// Sends frames without waiting, and reports for each whether the interface took it.
    pub(crate) fn send(&self, frames: &[Vec<u8>], mut report: impl FnMut(&[u8], bool)) {
        // SAFETY: all zero is a valid value of both types.
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
                let count = rest.len() as u32;
                // SAFETY: each vector points at a frame that outlives the call, which only reads.
                let sent = unsafe {
                    libc::sendmmsg(self.raw(), rest.as_mut_ptr(), count, libc::MSG_DONTWAIT)
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

    /// Frames that the kernel dropped for lack of a free slot since the last call.
    pub(crate) fn missed(&self) -> io::Result<u64> {
        // SAFETY: all zero is a valid tpacket_stats.
        let mut stats: libc::tpacket_stats = unsafe { std::mem::zeroed() };
        let mut len = size_of_val(&stats) as libc::socklen_t;
        let (level, option) = (libc::SOL_PACKET, libc::PACKET_STATISTICS);
        // SAFETY: the destination is writable for the length given.
        check(unsafe {
            libc::getsockopt(self.raw(), level, option, (&raw mut stats).cast(), &mut len)
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

impl Ring {
    /// `header` bytes precede each frame, because the socket asks for them.
    fn new(socket: &PacketSocket, slot: usize, blocks: usize, header: usize) -> io::Result<Self> {
        socket.set(
            libc::PACKET_RX_RING,
            libc::tpacket_req {
                tp_block_size: BLOCK as u32,
                tp_block_nr: blocks as u32,
                tp_frame_size: slot as u32,
                tp_frame_nr: (blocks * (BLOCK / slot)) as u32,
            },
        )?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let len = blocks * BLOCK;
        // SAFETY: a new mapping, of the length that the ring above was given.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                protection,
                libc::MAP_SHARED,
                socket.raw(),
                0,
            )
        };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let memory = NonNull::new(memory.cast()).expect("a mapping is never at address 0");
        Ok(Self {
            memory,
            slot,
            blocks,
            header,
            head: 0,
        })
    }

    /// The largest MTU whose frames fit a slot.
    pub(crate) fn largest_mtu(&self) -> u32 {
        (self.slot - OVERHEAD) as u32
    }

    /// Passes on the frames that are there, up to a batch; returns how many.
    pub(crate) fn receive(&mut self, mut take: impl FnMut(Frame<'_>)) -> usize {
        let per_block = BLOCK / self.slot;
        for count in 0..BATCH {
            let offset = self.head / per_block * BLOCK + self.head % per_block * self.slot;
            // SAFETY: the slot lies within the mapping and starts with a tpacket2_hdr, which is
            // aligned as the mapping is, to 16.
            let slot = unsafe { self.memory.add(offset) };
            let header = slot.cast::<libc::tpacket2_hdr>();
            // SAFETY: both sides use the status word as an atomic; see PACKET_MMAP.
            let status = unsafe { AtomicU32::from_ptr(&raw mut (*header.as_ptr()).tp_status) };
            if status.load(Ordering::Acquire) & libc::TP_STATUS_USER == 0 {
                return count;
            }
            // SAFETY: with TP_STATUS_USER set, the slot is ours until the store below. The kernel
            // wrote the address at ADDRESS, and `tp_snaplen` bytes, within the slot, at `tp_mac`,
            // and right before that the virtio-net header, if there is one.
            let (at, address, bytes) = unsafe {
                let header = header.as_ref();
                let address = slot.add(ADDRESS).cast::<libc::sockaddr_ll>().as_ref();
                let start = slot.add(usize::from(header.tp_mac) - self.header);
                let len = header.tp_snaplen as usize + self.header;
                let bytes = std::slice::from_raw_parts(start.as_ptr(), len);
                (
                    Duration::new(header.tp_sec.into(), header.tp_nsec),
                    address,
                    bytes,
                )
            };
            let outgoing = address.sll_pkttype == libc::PACKET_OUTGOING;
            take(Frame {
                at,
                outgoing,
                bytes,
            });
            status.store(libc::TP_STATUS_KERNEL, Ordering::Release);
            self.head = (self.head + 1) % (self.blocks * per_block);
        }
        BATCH
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nobody else has a pointer into it.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), self.blocks * BLOCK) };
    }
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}
