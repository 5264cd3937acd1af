//! Packet sockets (packet(7)): whole frames of one interface, read from memory shared with the
//! kernel. That, unlike a socket's buffer, is as large as we want without privileges.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use dibs_wire::virtio;
use nix::sys::socket::{setsockopt, sockopt};
use socket2::{Domain, SockFilter, Socket, Type};

/// Frames per system call when sending.
pub(crate) const BATCH: usize = 64;
/// What the kernel allocates at once for slots.
const BLOCK: usize = 1 << 20;
/// Where the kernel puts the sender's address in a slot: behind the header, aligned to 16.
const ADDRESS: usize = size_of::<libc::tpacket2_hdr>().next_multiple_of(16);
/// Bytes that a forwarding socket may have sent without their being received.
const SENDING: usize = 32 << 20;
/// Room for what precedes a frame in its slot.
const OVERHEAD: usize = 128;

/// Bytes of a listening socket's block, and how many there are. A block is handed over, and another begun, when it
/// is full or after so many milliseconds: so there is room for 64 MiB, and for 25 seconds.
const LISTENING: usize = 256 << 10;
const BLOCKS: usize = 256;
const HAND_OVER: u32 = 100;
/// Bytes of each frame for who listens to heads.
const HEAD: u32 = 384;

/// What is heard of each frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Listen {
    /// All of it, superpackets included.
    ToAll,
    /// The beginning.
    ToHeads,
}

/// What a packet socket has been offered, since it was last asked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offered {
    /// Frames that it took.
    pub(crate) taken: u64,
    /// Frames that it had no room for.
    pub(crate) missed: u64,
}

/// A packet socket bound to one interface.
#[derive(Debug)]
pub(crate) struct PacketSocket(Socket);

/// Memory shared with the kernel.
#[derive(Debug)]
struct Memory {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is its owner's alone, and the kernel's side is synchronised by the status words in it.
unsafe impl Send for Memory {}

/// Received frames, each in a slot of its own (TPACKET_V2): each can be read as soon as it is there. Only one
/// thread reads them.
#[derive(Debug)]
pub(crate) struct Ring {
    memory: Memory,
    slot: usize,
    head: usize,
}

/// Received frames, one behind the other in blocks (TPACKET_V3): a frame takes what it is long, and comes a little
/// later. Only one thread reads them.
#[derive(Debug)]
pub(crate) struct Blocks {
    memory: Memory,
    head: usize,
}

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
    /// Opens one in the calling thread's network namespace, whose frames carry a virtio-net header; those that we
    /// send are not received.
    pub(crate) fn forward(interface: &str, mtu: u32) -> Result<(Self, Ring)> {
        let open = || -> io::Result<(Self, Ring)> {
            let socket = Self::new(libc::tpacket_versions::TPACKET_V2)?;
            for option in [
                libc::PACKET_VNET_HDR,
                libc::PACKET_IGNORE_OUTGOING,
                libc::PACKET_QDISC_BYPASS,
            ] {
                socket.set(option, 1)?;
            }
            // What we send counts as ours until it is received, by another processor perhaps.
            // Users other than root get what the system lets them have.
            if setsockopt(&socket.0, sockopt::SndBufForce, &SENDING).is_err() {
                setsockopt(&socket.0, sockopt::SndBuf, &SENDING)?;
            }
            let slot = (mtu as usize + OVERHEAD).next_power_of_two().max(2048);
            let ring = Ring::new(&socket, slot, 16.max(4 * slot / 2048))?;
            socket.bind(interface)?;
            Ok((socket, ring))
        };
        open().with_context(|| format!("packet socket on {interface}"))
    }

    /// Opens one in the calling thread's network namespace, which hears both directions as they are.
    pub(crate) fn listen(interface: &str, what: Listen) -> Result<(Self, Blocks)> {
        let open = || -> io::Result<(Self, Blocks)> {
            let socket = Self::new(libc::tpacket_versions::TPACKET_V3)?;
            let blocks = Blocks::new(&socket)?;
            if what == Listen::ToHeads {
                socket.cut(HEAD)?;
            }
            socket.bind(interface)?;
            Ok((socket, blocks))
        };
        open().with_context(|| format!("packet socket on {interface}"))
    }

    /// One that receives nothing before it is bound.
    fn new(version: libc::tpacket_versions) -> io::Result<Self> {
        let socket = Self(Socket::new(Domain::PACKET, Type::RAW, None)?);
        socket.set(libc::PACKET_VERSION, version as libc::c_int)?;
        Ok(socket)
    }

    fn bind(&self, interface: &str) -> io::Result<()> {
        let index = nix::net::if_::if_nametoindex(interface)?;
        // SAFETY: all zero is a valid sockaddr_ll.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
        address.sll_ifindex = index as i32;
        let len = size_of_val(&address) as libc::socklen_t;
        // SAFETY: the address is initialised and of the length given.
        check(unsafe { libc::bind(self.raw(), (&raw const address).cast(), len) })?;
        Ok(())
    }

    /// Whether an Ethernet header stands in front of the IP packets of its interface, and not nothing.
    pub(crate) fn is_ethernet(&self) -> io::Result<bool> {
        let address = self.0.local_addr()?;
        // SAFETY: what there is room for in it is larger, and all zero behind the address.
        let address = unsafe { &*address.as_ptr().cast::<libc::sockaddr_ll>() };
        Ok([libc::ARPHRD_ETHER, libc::ARPHRD_LOOPBACK].contains(&address.sll_hatype))
    }

    /// Has the kernel keep so many bytes of each frame: a filter (bpf(4)) of one instruction, which returns that.
    fn cut(&self, bytes: u32) -> io::Result<()> {
        let code = (libc::BPF_RET | libc::BPF_K) as u16;
        self.0.attach_filter(&[SockFilter::new(code, 0, 0, bytes)])
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

    /// What became of the frames since the last call.
    pub(crate) fn offered(&self) -> io::Result<Offered> {
        // struct tpacket_stats_v3, of which version 2 has the first two: frames, dropped ones among them, those,
        // and one more number.
        let mut stats = [0u32; 3];
        let mut len = size_of_val(&stats) as libc::socklen_t;
        let (level, option) = (libc::SOL_PACKET, libc::PACKET_STATISTICS);
        // SAFETY: the destination is writable for the length given.
        check(unsafe {
            libc::getsockopt(self.raw(), level, option, (&raw mut stats).cast(), &mut len)
        })?;
        let [all, dropped, _] = stats.map(u64::from);
        Ok(Offered {
            taken: all - dropped,
            missed: dropped,
        })
    }

    fn raw(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Memory {
    /// Maps what the socket was given.
    fn map(socket: &PacketSocket, len: usize) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, of the length that the socket's ring was given.
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
        let start = NonNull::new(memory.cast()).expect("a mapping is never at address 0");
        Ok(Self { start, len })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nobody else has a pointer into it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

impl Ring {
    fn new(socket: &PacketSocket, slot: usize, blocks: usize) -> io::Result<Self> {
        socket.set(
            libc::PACKET_RX_RING,
            libc::tpacket_req {
                tp_block_size: BLOCK as u32,
                tp_block_nr: blocks as u32,
                tp_frame_size: slot as u32,
                tp_frame_nr: (blocks * (BLOCK / slot)) as u32,
            },
        )?;
        Ok(Self {
            memory: Memory::map(socket, blocks * BLOCK)?,
            slot,
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
            let slot = unsafe { self.memory.start.add(offset) };
            let header = slot.cast::<libc::tpacket2_hdr>();
            // SAFETY: both sides use the status word as an atomic; see PACKET_MMAP.
            let status = unsafe { AtomicU32::from_ptr(&raw mut (*header.as_ptr()).tp_status) };
            if status.load(Ordering::Acquire) & libc::TP_STATUS_USER == 0 {
                return count;
            }
            // SAFETY: with TP_STATUS_USER set, the slot is ours until the store below. The kernel
            // wrote the address at ADDRESS, and `tp_snaplen` bytes, within the slot, at `tp_mac`,
            // and right before that the virtio-net header.
            let (at, address, bytes) = unsafe {
                let header = header.as_ref();
                let address = slot.add(ADDRESS).cast::<libc::sockaddr_ll>().as_ref();
                let start = slot.add(usize::from(header.tp_mac) - virtio::LEN);
                let len = header.tp_snaplen as usize + virtio::LEN;
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
            self.head = (self.head + 1) % (self.memory.len / BLOCK * per_block);
        }
        BATCH
    }
}

impl Blocks {
    fn new(socket: &PacketSocket) -> io::Result<Self> {
        // Frames have no size of their own here, but the kernel wants one that divides a block.
        let frame = 2048;
        socket.set(
            libc::PACKET_RX_RING,
            libc::tpacket_req3 {
                tp_block_size: LISTENING as u32,
                tp_block_nr: BLOCKS as u32,
                tp_frame_size: frame as u32,
                tp_frame_nr: (BLOCKS * (LISTENING / frame)) as u32,
                tp_retire_blk_tov: HAND_OVER,
                tp_sizeof_priv: 0,
                tp_feature_req_word: 0,
            },
        )?;
        let memory = Memory::map(socket, BLOCKS * LISTENING)?;
        Ok(Self { memory, head: 0 })
    }

    /// Passes on the frames of the next block, if it has been handed over; returns how many those are.
    pub(crate) fn receive(&mut self, mut take: impl FnMut(Frame<'_>)) -> usize {
        // SAFETY: the block lies within the mapping and starts with a tpacket_block_desc, which is aligned as the
        // mapping is.
        let block = unsafe { self.memory.start.add(self.head * LISTENING) };
        // SAFETY: blocks of version 3 have this header, whose integers are valid whatever their bits.
        let header =
            unsafe { &raw mut (*block.cast::<libc::tpacket_block_desc>().as_ptr()).hdr.bh1 };
        // SAFETY: both sides use the status word as an atomic; see PACKET_MMAP.
        let status = unsafe { AtomicU32::from_ptr(&raw mut (*header).block_status) };
        if status.load(Ordering::Acquire) & libc::TP_STATUS_USER == 0 {
            return 0;
        }
        // SAFETY: with TP_STATUS_USER set, the block is ours until the store below.
        let (count, first) = unsafe { ((*header).num_pkts, (*header).offset_to_first_pkt) };
        let mut offset = first as usize;
        for _ in 0..count {
            // SAFETY: the kernel wrote so many frames, each within the block: a tpacket3_hdr, aligned to 16, the
            // address behind it, aligned likewise, `tp_snaplen` bytes at `tp_mac`, and the next at
            // `tp_next_offset`.
            let (at, address, bytes, next) = unsafe {
                let frame = block.add(offset);
                let header = frame.cast::<libc::tpacket3_hdr>().as_ref();
                let behind = size_of::<libc::tpacket3_hdr>().next_multiple_of(16);
                let address = frame.add(behind).cast::<libc::sockaddr_ll>().as_ref();
                let start = frame.add(usize::from(header.tp_mac));
                let len = header.tp_snaplen as usize;
                let at = Duration::new(header.tp_sec.into(), header.tp_nsec);
                let bytes = std::slice::from_raw_parts(start.as_ptr(), len);
                (at, address, bytes, header.tp_next_offset)
            };
            let outgoing = address.sll_pkttype == libc::PACKET_OUTGOING;
            take(Frame {
                at,
                outgoing,
                bytes,
            });
            offset += next as usize;
        }
        status.store(libc::TP_STATUS_KERNEL, Ordering::Release);
        self.head = (self.head + 1) % BLOCKS;
        count as usize
    }
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}
