//! A host's kernel: a TCP/IP stack between its applications and what carries its packets.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;

use dibs_core::Time;
use dibs_wire::SeqNumber;
use dibs_wire::packet::{Tuple, flags};
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{self, DeviceCapabilities, Medium};
use smoltcp::socket::tcp;
use smoltcp::time::Instant;
use smoltcp::wire::{HardwareAddress, IpCidr, IpEndpoint};

use crate::coverage::{Coverage, Seen};
use crate::offload;

thread_local! {
    /// TSval of the kernel that runs: smoltcp asks a plain function for it.
    static TSVAL: Cell<u32> = const { Cell::new(0) };
}

/// The packets between smoltcp and the world.
#[derive(Default)]
struct Device {
    mtu: usize,
    received: VecDeque<Vec<u8>>,
    sent: Vec<Vec<u8>>,
}

struct Received(Vec<u8>);

impl phy::RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

struct Sending<'a>(&'a mut Vec<Vec<u8>>);

impl phy::TxToken for Sending<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut packet = vec![0; len];
        let result = f(&mut packet);
        self.0.push(packet);
        result
    }
}

impl phy::Device for Device {
    type RxToken<'a> = Received;
    type TxToken<'a> = Sending<'a>;

    fn receive(&mut self, _: Instant) -> Option<(Received, Sending<'_>)> {
        let packet = self.received.pop_front()?;
        Some((Received(packet), Sending(&mut self.sent)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Sending<'_>> {
        Some(Sending(&mut self.sent))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = self.mtu;
        capabilities
    }
}

/// How a segment came to a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By the ordinary route.
    Plain,
    /// By a bump's TUN.
    Bump(u8),
}

/// What a kernel keeps for PAWS (RFC 7323, 5.3), which smoltcp does not do.
#[derive(Clone, Copy, Debug)]
struct Paws {
    recent: u32,
    from: Way,
    acked: SeqNumber,
}

/// One host's stack.
pub struct Kernel {
    interface: Interface,
    device: Device,
    /// Its sockets.
    pub sockets: SocketSet<'static>,
    paws: BTreeMap<Tuple, Paws>,
    /// TSval at time zero.
    clock: u32,
    /// Payload bytes that its TCP sent again.
    pub retransmitted: u64,
    /// What it sent, by connection as it sends.
    tracks: BTreeMap<Tuple, Track>,
    /// Window scales that the far ends announced, by connection as they send.
    scales: BTreeMap<Tuple, u8>,
    /// Local ports whose connections send urgent data.
    pub urgent: BTreeSet<u16>,
    /// What happened.
    pub seen: Coverage,
}

/// One direction of a connection, as the kernel sends it.
#[derive(Clone, Debug)]
struct Track {
    /// The number behind the highest one sent, and the one that the far end waits for.
    top: SeqNumber,
    una: SeqNumber,
    /// The byte before `top`, if it is one.
    last: Option<u8>,
    /// Where the FIN stands, and how many bare acknowledgements came up to it.
    fin: Option<(SeqNumber, u32)>,
    /// Windows that the far end and this one announced last.
    theirs: u16,
    ours: u16,
    /// The numbers that urgent pointers said.
    urgents: BTreeSet<u32>,
}

impl Kernel {
    /// A stack with these addresses; links of `mtu` bytes.
    pub fn new(seed: u64, addresses: &[IpAddr], mtu: usize, clock: u32) -> Self {
        let mut device = Device {
            mtu,
            ..Device::default()
        };
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = seed;
        let mut interface = Interface::new(config, &mut device, Instant::ZERO);
        interface.update_ip_addrs(|list| {
            for &address in addresses {
                let len = if address.is_ipv4() { 24 } else { 64 };
                list.push(IpCidr::new(address.into(), len))
                    .expect("two addresses fit");
            }
        });
        Self {
            interface,
            device,
            sockets: SocketSet::new(Vec::new()),
            paws: BTreeMap::new(),
            clock,
            retransmitted: 0,
            tracks: BTreeMap::new(),
            scales: BTreeMap::new(),
            urgent: BTreeSet::new(),
            seen: Coverage::default(),
        }
    }

    /// A new TCP socket.
    pub fn socket(&mut self, rx: usize, tx: usize) -> SocketHandle {
        let mut socket = tcp::Socket::new(
            tcp::SocketBuffer::new(vec![0; rx]),
            tcp::SocketBuffer::new(vec![0; tx]),
        );
        socket.set_tsval_generator(Some(|| TSVAL.get()));
        self.sockets.add(socket)
    }

    /// Connects a socket.
    pub fn connect(&mut self, socket: SocketHandle, to: (IpAddr, u16), from: (IpAddr, u16)) {
        let socket = self.sockets.get_mut::<tcp::Socket<'_>>(socket);
        socket
            .connect(self.interface.context(), to, from)
            .expect("a fresh socket connects");
    }

    /// Hands a packet in, which may be dropped as PAWS does.
    ///
    /// # Errors
    /// A bump's segment with new data is too old by the time stamp that a bump brought.
    pub fn receive(&mut self, packet: Vec<u8>, way: Way) -> Result<(), String> {
        if let Some(s) = offload::tcp(&packet)
            && let Some((tsval, _)) = s.timestamps
        {
            if s.has(flags::SYN) {
                self.scales.insert(s.tuple, scale_of(s.options));
                let acked = s.seq;
                let paws = Paws {
                    recent: tsval,
                    from: way,
                    acked,
                };
                self.paws.insert(s.tuple, paws);
            } else if let Some(paws) = self.paws.get_mut(&s.tuple) {
                let end = s.seq.add(s.payload.len() as u32);
                if (tsval.wrapping_sub(paws.recent) as i32) < 0 && !s.has(flags::RST) {
                    let bumps = way != Way::Plain && paws.from != Way::Plain;
                    if bumps && end.is_after(paws.acked) {
                        return Err(format!(
                            "TSval went back from {} ({:?}) to {tsval} ({way:?}) at {}",
                            paws.recent,
                            paws.from,
                            s.seq.raw()
                        ));
                    }
                    if !s.payload.is_empty() {
                        return Ok(());
                    }
                } else if !s.seq.is_after(paws.acked) {
                    paws.recent = tsval;
                    paws.from = way;
                }
            }
        }
        let reopens = self.reopens_window(&packet);
        if !self.repeats_up_to_fin(&packet) {
            self.device.received.push_back(packet);
        }
        if let Some(repetition) = reopens {
            for _ in 0..3 {
                self.device.received.push_back(repetition.clone());
            }
        }
        Ok(())
    }

    /// The daemon that saw the time stamps so far is gone: the next one knows of none until this
    /// kernel echoes them.
    pub fn forget_floors(&mut self) {
        for paws in self.paws.values_mut() {
            paws.from = Way::Plain;
        }
    }

    /// Whether this opens a closed window while something is under way: then a bare repetition of it.
    /// smoltcp 0.14 forgets its timer here, and would never send again what was lost; by three
    /// duplicates it does.
    fn reopens_window(&self, packet: &[u8]) -> Option<Vec<u8>> {
        let s = offload::tcp(packet)?;
        let track = self.tracks.get(&s.tuple.reversed())?;
        let behind_fin = track.fin.is_some_and(|(fin, _)| !fin.is_after(s.ack));
        let under_way = track.top.is_after(s.ack) && !track.una.is_after(s.ack) && !behind_fin;
        let bare = s.flags & (flags::SYN | flags::FIN | flags::RST) == 0 && s.has(flags::ACK);
        let opens = track.theirs == 0 && s.window != 0;
        (opens && bare && under_way).then(|| {
            offload::rewrite(packet, |e| {
                e.seq = e.seq.add(e.payload.len() as u32);
                e.flags = flags::ACK;
                e.urgent = 0;
                e.payload.clear();
            })
        })
    }

    /// Whether this is a duplicate acknowledgement of everything but a FIN. Three of them make
    /// smoltcp 0.14 stop its timer and send nothing, so a lost FIN would never be sent again
    /// (`seq_to_transmit` lets a fast retransmission pass only with data).
    fn repeats_up_to_fin(&mut self, packet: &[u8]) -> bool {
        let Some(s) = offload::tcp(packet) else {
            return false;
        };
        let bare = s.payload.is_empty() && s.flags & (flags::SYN | flags::FIN | flags::RST) == 0;
        let Some(track) = self.tracks.get_mut(&s.tuple.reversed()) else {
            return false;
        };
        if s.has(flags::ACK) && s.ack.is_after(track.una) && !s.ack.is_after(track.top) {
            track.una = s.ack;
        }
        track.theirs = s.window;
        match &mut track.fin {
            Some((fin, seen)) if bare && s.ack == *fin => {
                *seen += 1;
                *seen > 1
            }
            _ => false,
        }
    }

    /// By how many bits it shifts the windows that the far end gives (RFC 7323).
    pub fn window_scale(&self, tuple: &Tuple) -> u8 {
        self.scales.get(&tuple.reversed()).copied().unwrap_or(0)
    }

    /// Whether it has a connection that may still send or get something.
    pub fn speaks(&self, tuple: &Tuple) -> bool {
        self.sockets.iter().any(|(_, socket)| {
            let smoltcp::socket::Socket::Tcp(socket) = socket else {
                return false;
            };
            let over = matches!(socket.state(), tcp::State::Closed | tcp::State::TimeWait);
            let is = |end: Option<IpEndpoint>, ip: IpAddr, port| {
                end.is_some_and(|end| end.addr == ip.into() && end.port == port)
            };
            !over
                && is(socket.local_endpoint(), tuple.src, tuple.sport)
                && is(socket.remote_endpoint(), tuple.dst, tuple.dport)
        })
    }

    /// Whether a pointer of this kernel said so.
    pub fn said_urgent(&self, tuple: &Tuple, at: SeqNumber) -> bool {
        let track = self.tracks.get(tuple);
        track.is_some_and(|t| t.urgents.contains(&at.raw()))
    }

    /// Lets the stack work; what it sends comes out.
    pub fn poll(&mut self, now: Time) -> Vec<Vec<u8>> {
        let millis = (now.as_nanos() / 1_000_000) as u32;
        TSVAL.set(self.clock.wrapping_add(millis));
        self.interface
            .poll(instant(now), &mut self.device, &mut self.sockets);
        let sent = std::mem::take(&mut self.device.sent);
        let sent = sent.into_iter().map(|packet| self.finish(packet));
        sent.collect()
    }

    /// Notes what smoltcp sends. After a timeout it acknowledges with the number that it goes back
    /// to; if both ends do so, neither accepts the other's any more. A bare acknowledgement carries
    /// the highest number sent, as in 4.4BSD.
    fn finish(&mut self, packet: Vec<u8>) -> Vec<u8> {
        let Some(s) = offload::tcp(&packet) else {
            return packet;
        };
        if let Some(paws) = self.paws.get_mut(&s.tuple.reversed())
            && s.has(flags::ACK)
            && s.ack.is_after(paws.acked)
        {
            paws.acked = s.ack;
        }
        let len = s.payload.len() as u32;
        if s.has(flags::SYN) {
            let top = s.seq.add(1);
            let fresh = Track {
                top,
                una: s.seq,
                last: None,
                fin: None,
                theirs: s.window,
                ours: s.window,
                urgents: BTreeSet::new(),
            };
            let before = self.tracks.insert(s.tuple, fresh);
            if before.is_some_and(|t| t.top == top) {
                self.seen.note(Seen::SynAgain);
            }
            return packet;
        }
        let Some(track) = self.tracks.get_mut(&s.tuple) else {
            return packet;
        };
        if s.has(flags::RST) {
            return packet;
        }
        if (s.window == 0) != (track.ours == 0) {
            self.seen.note(match s.window {
                0 => Seen::WindowClosed,
                _ => Seen::WindowReopened,
            });
        }
        track.ours = s.window;
        if s.has(flags::FIN) {
            track.fin.get_or_insert((s.seq.add(len), 0));
        }
        let pushed = s.flags & (flags::PSH | flags::FIN) != 0;
        if len == 1 && s.payload[0] == 0 && s.seq.add(1) == track.top && !pushed {
            // smoltcp's keepalive: a byte of garbage, which a far end that has not got the real one
            // yet would take for it. Others send none then. Where the real one is like it, it is harmless,
            // and may be a probe of a closed window.
            self.seen.note(Seen::Keepalive);
            return match track.una == track.top || track.last == Some(0) {
                true => packet,
                false => offload::rewrite(&packet, |e| e.payload.clear()),
            };
        }
        if len == 1 && track.theirs == 0 {
            self.seen.note(Seen::WindowProbe);
        }
        if track.top.is_after(s.seq) && len > 0 {
            let again = u64::from(len).min(track.top.distance_from(s.seq) as u64);
            self.retransmitted += again;
            self.seen.note(Seen::Retransmitted);
        }
        let end = s.seq.add(len + u32::from(s.has(flags::FIN)));
        if end.is_after(track.top) {
            track.top = end;
            let fin = s.has(flags::FIN);
            track.last = s.payload.last().copied().filter(|_| !fin);
        } else if end == s.seq {
            let top = track.top;
            return offload::rewrite(&packet, |e| e.seq = top);
        }
        if len > 1 && self.urgent.contains(&s.tuple.sport) && s.seq.raw().is_multiple_of(5) {
            self.seen.note(Seen::Urgent);
            let pointer = (s.seq.raw() % len + 1) as u16;
            track.urgents.insert(s.seq.add(u32::from(pointer)).raw());
            return offload::rewrite(&packet, |e| {
                e.flags |= flags::URG;
                e.urgent = pointer;
            });
        }
        packet
    }

    /// When the stack wants to work again.
    pub fn poll_at(&mut self, now: Time) -> Option<Time> {
        let at = self.interface.poll_at(instant(now), &self.sockets)?;
        Some(Time::from_nanos(at.total_micros().max(0) as u64 * 1000))
    }
}

fn instant(now: Time) -> Instant {
    Instant::from_micros((now.as_nanos() / 1000) as i64)
}

/// The window scale among a SYN's options.
fn scale_of(mut options: &[u8]) -> u8 {
    loop {
        match *options {
            [3, 3, scale, ..] => return scale,
            [1, ref rest @ ..] => options = rest,
            [kind, len, ..] if kind > 1 && len >= 2 => {
                options = options.get(usize::from(len)..).unwrap_or(&[])
            }
            _ => return 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Two kernels side by side, a connection from the first to the second, and what passes.
    struct Side {
        kernels: [Kernel; 2],
        sockets: [SocketHandle; 2],
        now: Time,
    }

    type Pass<'a> = dyn FnMut(usize, Vec<u8>) -> Option<Vec<u8>> + 'a;

    impl Side {
        fn connected() -> Self {
            let ends: [IpAddr; 2] = ["10.1.0.1", "10.1.0.2"].map(|a| a.parse().unwrap());
            let mut kernels = [0, 1].map(|host| Kernel::new(host as u64, &[ends[host]], 1500, 7));
            let sockets = [0, 1].map(|host: usize| kernels[host].socket(65_535, 65_535));
            let server = kernels[1].sockets.get_mut::<tcp::Socket<'_>>(sockets[1]);
            server.listen((ends[1], 80)).unwrap();
            kernels[0].connect(sockets[0], (ends[1], 80), (ends[0], 4000));
            let now = Time::ZERO;
            let mut side = Self {
                kernels,
                sockets,
                now,
            };
            side.run(100, &mut |_, packet| Some(packet));
            side
        }

        fn run(&mut self, millis: u64, pass: &mut Pass<'_>) {
            for _ in 0..millis {
                self.now += Duration::from_millis(1);
                for from in 0..2 {
                    let sent = self.kernels[from].poll(self.now);
                    for packet in sent.into_iter().filter_map(|p| pass(from, p)) {
                        self.kernels[1 - from].receive(packet, Way::Plain).unwrap();
                    }
                }
            }
        }

        fn socket(&mut self, host: usize) -> &mut tcp::Socket<'static> {
            self.kernels[host].sockets.get_mut(self.sockets[host])
        }

        /// Bytes that wait for the second application.
        fn arrived(&mut self) -> usize {
            self.socket(1).recv_queue()
        }
    }

    fn closed(packet: &[u8]) -> Vec<u8> {
        offload::rewrite(packet, |e| e.window = 0)
    }

    #[test]
    fn a_probe_that_looks_like_a_keepalive_gets_through() {
        let mut side = Side::connected();
        side.socket(0).send_slice(&[1]).unwrap();
        side.run(100, &mut |from, packet| match from {
            0 => Some(packet),
            _ => Some(closed(&packet)),
        });
        side.socket(0).send_slice(&[0; 10]).unwrap();
        let mut lost = false;
        side.run(20_000, &mut |from, packet| {
            let probe = from == 0 && offload::tcp(&packet).is_some_and(|s| s.payload.len() == 1);
            (!probe || std::mem::replace(&mut lost, true)).then_some(packet)
        });
        assert!(lost, "the first probe was lost");
        assert_eq!(side.arrived(), 11);
    }

    #[test]
    fn what_was_lost_before_a_window_closed_is_sent_again() {
        let mut side = Side::connected();
        // The second of two segments is lost.
        let socket = side.socket(0);
        socket.set_congestion_control(tcp::CongestionControl::None);
        socket.set_nagle_enabled(false);
        socket.send_slice(&[5; 2 * 1448]).unwrap();
        let (mut segments, mut answer) = (0, None);
        side.run(50, &mut |from, packet| {
            if from == 1 {
                answer = Some(packet.clone());
                return Some(closed(&packet));
            }
            segments += 1;
            (segments == 1).then_some(packet)
        });
        assert_eq!((segments, side.arrived()), (2, 1448));
        let answer = answer.expect("the first segment was acknowledged");
        side.kernels[0].receive(answer, Way::Plain).unwrap();
        side.run(5000, &mut |_, packet| Some(packet));
        assert_eq!(side.arrived(), 2 * 1448);
    }
}
