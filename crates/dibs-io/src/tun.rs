//! TUN devices that hand over TCP superpackets whole, both ways (docs/architecture.md).

use crate::SetupError;
use crate::fallback::Offload;
use crate::netlink;
use dibs_wire::segment::Segments;
use dibs_wire::virtio::{self, VirtioHdr};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use tun_rs::{DeviceBuilder, SyncDevice};

/// Longest frame: a virtio header and a packet of 65,535 bytes.
pub const FRAME_MAX: usize = virtio::LEN + 65_535;

/// Frames that the device holds for us before it drops: room for what arrives while our thread is not
/// running (the kernel's default is 500), also where a thousand connections begin at once. To TCP a drop is an
/// attempt in vain, and Linux gives a closed socket up after eight of them in a row, without a word to the far
/// end. Up to 64 KiB each, which bounds the memory.
const RING: u32 = 4096;

/// A TUN device without queueing discipline, nonblocking, gone when dropped.
///
/// Frames are a virtio header ([`VirtioHdr`]) and an IP packet. Superpackets are TCP only; the
/// kernel does not hand over UDP ones.
pub struct Tun {
    device: SyncDevice,
    name: String,
    if_index: u32,
    /// Whether the device itself speaks virtio headers.
    vnet: bool,
    gso: Offload,
    /// Room to join a frame given in pieces when it has to be cut in software.
    joined: Vec<u8>,
    counters: TunCounters,
}

/// Counters of a [`Tun`] since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TunCounters {
    /// Superpackets that the kernel refused, and took as segments.
    pub gso_refused: u64,
    /// Superpackets cut in software, refused ones included.
    pub superpackets_cut: u64,
    /// Segments written for them.
    pub segments_written: u64,
}

impl Tun {
    /// Creates the device `name` in the calling thread's network namespace (or takes over a
    /// persistent one): checksum and TCP segmentation offload, qdisc `noqueue`, and still down,
    /// so that sysctls and addresses can be set before the first packet. [`Tun::up`] follows.
    ///
    /// Where the kernel refuses the offloads the device is opened without, see
    /// [`Tun::open_plain`].
    pub fn open(name: &str, mtu: u16) -> Result<Self, SetupError> {
        match builder(name, mtu)
            .with(|options| _ = options.offload(true))
            .build_sync()
        {
            Ok(device) => {
                set_offloads(&device).map_err(SetupError::at("TUNSETOFFLOAD", name))?;
                Self::finish(device, name, true)
            }
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Self::open_plain(name, mtu),
            Err(error) => Err(SetupError::at("create TUN", name)(error)),
        }
    }

    /// As [`Tun::open`], without offloads: single packets with complete checksums come and go.
    /// The virtio header is still part of every frame, so superpackets can be sent; they are
    /// cut in software.
    pub fn open_plain(name: &str, mtu: u16) -> Result<Self, SetupError> {
        let device = builder(name, mtu)
            .build_sync()
            .map_err(SetupError::at("create TUN", name))?;
        Self::finish(device, name, false)
    }

    fn finish(device: SyncDevice, name: &str, vnet: bool) -> Result<Self, SetupError> {
        device
            .set_nonblocking(true)
            .map_err(SetupError::at("O_NONBLOCK", name))?;
        let name = device.name().map_err(SetupError::at("TUNGETIFF", name))?;
        let if_index = device
            .if_index()
            .map_err(SetupError::at("SIOCGIFINDEX", &name))?;
        netlink::set_ring(if_index, RING).map_err(SetupError::at("txqueuelen", &name))?;
        netlink::set_noqueue(if_index).map_err(SetupError::at("qdisc noqueue", &name))?;
        Ok(Self {
            device,
            name,
            if_index,
            vnet,
            gso: Offload::default(),
            joined: Vec::with_capacity(FRAME_MAX),
            counters: TunCounters::default(),
        })
    }

    /// Sets the link up.
    pub fn up(&self) -> Result<(), SetupError> {
        self.device
            .enabled(true)
            .map_err(SetupError::at("link up", &self.name))
    }

    /// The interface's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The interface's index in the namespace that it was created in.
    pub fn if_index(&self) -> u32 {
        self.if_index
    }

    /// Counts so far.
    pub fn counters(&self) -> TunCounters {
        self.counters
    }

    /// True if superpackets go to the kernel whole, as far as known.
    pub fn offloads(&self) -> bool {
        self.vnet && self.gso.active()
    }

    /// Reads one frame and returns its length. `WouldBlock` when there is none.
    ///
    /// # Panics
    /// If `buf` is shorter than [`FRAME_MAX`]: the kernel would cut the frame without a word.
    pub fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        assert!(
            buf.len() >= FRAME_MAX,
            "a TUN frame needs {FRAME_MAX} bytes"
        );
        if self.vnet {
            return self.device.recv(buf);
        }
        let len = self.device.recv(&mut buf[virtio::LEN..])?;
        buf[..virtio::LEN].fill(0);
        Ok(virtio::LEN + len)
    }

    /// Writes one frame. A superpacket that the kernel refuses goes in as segments.
    ///
    /// Errors: the kernel's own, such as EIO while the link is down; EINVAL for a frame that
    /// neither the kernel nor [`Segments`] can read. After an error inside a run of segments
    /// those before it are in.
    pub fn send(&mut self, frame: &[u8]) -> io::Result<()> {
        self.sendv(&[IoSlice::new(frame)])
    }

    /// As [`Tun::send`], for a frame in pieces; the first holds at least the virtio header.
    pub fn sendv(&mut self, frame: &[IoSlice<'_>]) -> io::Result<()> {
        let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
        let header = frame
            .first()
            .and_then(|piece| VirtioHdr::decode(piece.first_chunk()?).ok())
            .ok_or_else(invalid)?;
        let superpacket = header.gso_size > 0;
        let mut refused = false;
        if self.vnet && (!superpacket || self.gso.wanted()) {
            match self.device.send_vectored(frame) {
                Ok(_) if superpacket => {
                    self.gso.accepted();
                    return Ok(());
                }
                Ok(_) => return Ok(()),
                Err(error) if superpacket && error.raw_os_error() == Some(libc::EINVAL) => {
                    refused = true;
                }
                Err(error) => return Err(error),
            }
        }
        let written = self.send_cut(frame)?;
        if superpacket {
            self.counters.superpackets_cut += 1;
            self.counters.segments_written += written;
        }
        if refused {
            // Only now is it known that the offload was at fault and not the packet.
            self.counters.gso_refused += 1;
            self.gso.refused();
        }
        Ok(())
    }

    /// Writes a frame as complete packets; returns how many.
    fn send_cut(&mut self, frame: &[IoSlice<'_>]) -> io::Result<u64> {
        let frame = match frame {
            [whole] => whole,
            pieces => {
                self.joined.clear();
                pieces
                    .iter()
                    .for_each(|piece| self.joined.extend_from_slice(piece));
                self.joined.as_slice()
            }
        };
        let segments =
            Segments::parse(frame).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
        let header: &[u8] = if self.vnet { &[0; virtio::LEN] } else { &[] };
        let mut written = 0;
        for segment in segments {
            let pieces = [header, segment.headers(), segment.payload()].map(IoSlice::new);
            self.device.send_vectored(&pieces)?;
            written += 1;
        }
        Ok(written)
    }
}

impl AsFd for Tun {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

fn builder(name: &str, mtu: u16) -> DeviceBuilder {
    DeviceBuilder::new().name(name).mtu(mtu).enable(false)
}

/// TCP superpackets, also with ECN's CWR; not the UDP ones that tun-rs asks for as well.
#[allow(unsafe_code)]
fn set_offloads(device: &SyncDevice) -> io::Result<()> {
    let tcp = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
    let set = |mask: libc::c_uint| {
        // SAFETY: TUNSETOFFLOAD takes its mask by value; the descriptor lives as long as `device`.
        match unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETOFFLOAD, mask) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    set(tcp | libc::TUN_F_TSO_ECN).or_else(|_| set(tcp))
}
