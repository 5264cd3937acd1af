//! A host's kernel: a TCP/IP stack between its applications and what carries its packets.

#[cfg(test)]
mod tests;
mod track;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;

use dibs_core::Time;
use dibs_settings::BumpId;
use dibs_switch::matching::Stand;
use dibs_wire::SeqNumber;
use dibs_wire::packet::{FlowKey, flags};
use etherparse::{TcpOptionElement, TcpOptionsIterator};
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{self, DeviceCapabilities, Medium};
use smoltcp::socket::tcp;
use smoltcp::time::Instant;
use smoltcp::wire::{HardwareAddress, IpCidr, IpEndpoint};

use crate::coverage::{Coverage, Seen};
use crate::offload;
use track::{Heard, Track};

/// Bytes that no window of these kernels has room for.
const MOST_ROOM: u32 = 4 << 20;

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
    Bump(BumpId),
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
    paws: BTreeMap<FlowKey, Paws>,
    /// TSval at time zero.
    clock: u32,
    /// Payload bytes that its TCP sent again.
    pub retransmitted: u64,
    /// What it sent, by connection as it sends.
    tracks: BTreeMap<FlowKey, Track>,
    /// Window scales that the far ends announced, by connection as they send.
    scales: BTreeMap<FlowKey, u8>,
    /// Local ports whose connections send urgent data.
    pub urgent: BTreeSet<u16>,
    /// Coverage of what happened.
    pub seen: Coverage,
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
        if self.challenges(&packet) {
            return Ok(());
        }
        let heard = self.hear(&packet);
        self.device.received.extend(heard.before);
        if !heard.withheld {
            self.device.received.push_back(self.as_answered(packet));
        }
        self.repeat(heard.repetition);
        Ok(())
    }

    /// True for a reset in answer to an acknowledgement that is not this kernel's last one. Linux challenges it (RFC 5961, 3.2), smoltcp
    /// takes it if it lies in the window.
    fn challenges(&self, packet: &[u8]) -> bool {
        offload::tcp(packet).is_some_and(|s| {
            let track = self.tracks.get(&s.tuple.reversed());
            let is_answer = s.flags & (flags::RST | flags::ACK) == flags::RST;
            is_answer && track.is_some_and(|track| track.acked.is_some_and(|acked| acked != s.seq))
        })
    }

    /// Makes smoltcp answer a segment from outside its window as Linux does: it drops one with an old acknowledgement before it looks
    /// at the sequence number.
    fn as_answered(&self, packet: Vec<u8>) -> Vec<u8> {
        let una = offload::tcp(&packet).and_then(|s| {
            let track = self.tracks.get(&s.tuple.reversed())?;
            let may_be_answered = s.has(flags::ACK) && s.flags & (flags::SYN | flags::RST) == 0;
            let acked = track
                .acked
                .filter(|_| may_be_answered && track.una.is_after(s.ack))?;
            // A probe of a closed window, or bytes that it has.
            let plain = s.flags & !flags::PSH == flags::ACK;
            let asks = plain && (s.window == 0) == s.payload.is_empty();
            (track::is_outside(s.seq, acked) || asks && acked.is_after(s.seq)).then_some(track.una)
        });
        match una {
            Some(una) => offload::rewrite(&packet, |headers, _| headers.ack = una),
            None => packet,
        }
    }

    /// Looks at what comes to a connection.
    fn hear(&mut self, packet: &[u8]) -> Heard {
        let Some(s) = offload::tcp(packet) else {
            return Heard::default();
        };
        let track = self.tracks.get_mut(&s.tuple.reversed());
        track.map_or_else(Heard::default, |track| track.hear(packet, &s))
    }

    /// Three duplicates of an acknowledgement make smoltcp send what is missing.
    fn repeat(&mut self, acknowledgement: Option<Vec<u8>>) {
        if let Some(acknowledgement) = acknowledgement {
            let three = std::iter::repeat_n(acknowledgement, 3);
            self.device.received.extend(three);
        }
    }

    /// Makes connections go on that smoltcp has forgotten.
    fn remind(&mut self, now: Time) {
        let due = self.tracks.iter().filter(|(_, track)| track.is_due(now));
        let due: Vec<FlowKey> = due.map(|(tuple, _)| *tuple).collect();
        for tuple in due {
            let (speaks, tsval) = (self.speaks(&tuple), self.tsval(now));
            let track = self.tracks.get_mut(&tuple).expect("it was just there");
            track.sent_at = speaks.then_some(now);
            if let Some(fin) = track.fin_again(tsval) {
                self.device.sent.extend(speaks.then_some(fin));
                continue;
            }
            let repetition = track.repetition().filter(|_| speaks);
            self.repeat(repetition);
        }
    }

    /// The daemon that saw the time stamps so far is gone: the next one knows of none until this
    /// kernel echoes them.
    pub fn forget_floors(&mut self) {
        for paws in self.paws.values_mut() {
            paws.from = Way::Plain;
        }
    }

    /// By how many bits it shifts the windows that the far end gives (RFC 7323).
    pub fn window_scale(&self, tuple: &FlowKey) -> u8 {
        self.scales.get(&tuple.reversed()).copied().unwrap_or(0)
    }

    /// State of a connection that is open, as this kernel says it if it is asked.
    pub fn stand(&self, tuple: &FlowKey, now: Time) -> Option<Stand> {
        let track = self.tracks.get(tuple).filter(|_| self.speaks(tuple))?;
        let paws = self.paws.get(&tuple.reversed());
        Some(Stand {
            seq: track.top.raw(),
            ack: track.acked?.raw(),
            timestamps: paws.map(|paws| (self.tsval(now), paws.recent)),
        })
    }

    /// Bytes of a connection that went out and that the far end has not acknowledged.
    pub fn outstanding(&self, tuple: &FlowKey) -> u32 {
        let track = self.tracks.get(tuple);
        track.map_or(0, |track| track.top.distance_from(track.una).unsigned_abs())
    }

    fn tsval(&self, now: Time) -> u32 {
        self.clock.wrapping_add((now.as_nanos() / 1_000_000) as u32)
    }

    /// True if it has a connection that may still send or get something.
    pub fn speaks(&self, tuple: &FlowKey) -> bool {
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

    /// False if a number of the far end lies beyond all windows of a connection, so that conntrack takes a segment for invalid.
    pub fn is_near(&self, tuple: &FlowKey, seq: SeqNumber) -> bool {
        let acked = self.tracks.get(tuple).and_then(|track| track.acked);
        acked.is_none_or(|acked| !track::is_outside(seq, acked))
    }

    /// True if a pointer of this kernel said so.
    pub fn said_urgent(&self, tuple: &FlowKey, at: SeqNumber) -> bool {
        let track = self.tracks.get(tuple);
        track.is_some_and(|t| t.urgents.contains(&at.raw()))
    }

    /// Lets the stack work; what it sends comes out.
    pub fn poll(&mut self, now: Time) -> Vec<Vec<u8>> {
        TSVAL.set(self.tsval(now));
        self.remind(now);
        self.interface
            .poll(instant(now), &mut self.device, &mut self.sockets);
        let sent = std::mem::take(&mut self.device.sent);
        let sent = sent.into_iter().map(|packet| self.finish(now, packet));
        sent.collect()
    }

    /// Notes what smoltcp sends. After a timeout it acknowledges with the number that it goes back
    /// to; if both ends do so, neither accepts the other's any more. A bare acknowledgement carries
    /// the highest number sent, as in 4.4BSD, that lies within the far end's window, as in Linux.
    fn finish(&mut self, now: Time, packet: Vec<u8>) -> Vec<u8> {
        let believed = offload::tcp(&packet).map(|s| (track::end(&s), s.has(flags::FIN)));
        let Some((believed, ends)) = believed else {
            return packet;
        };
        let packet = self.within_window(packet);
        let s = offload::tcp(&packet).expect("it was one before");
        if let Some(paws) = self.paws.get_mut(&s.tuple.reversed())
            && s.has(flags::ACK)
            && s.ack.is_after(paws.acked)
        {
            paws.acked = s.ack;
        }
        let len = s.payload.len() as u32;
        if s.has(flags::SYN) {
            let top = s.seq.add(1);
            let mut fresh = Track::new(&s);
            if let Some(before) = self.tracks.remove(&s.tuple) {
                if before.top == top {
                    self.seen.note(Seen::SynAgain);
                }
                // What an older connection of these ports sent may still be under way.
                fresh.urgents = before.urgents;
            }
            self.tracks.insert(s.tuple, fresh);
            return packet;
        }
        let Some(track) = self.tracks.get_mut(&s.tuple) else {
            return packet;
        };
        if s.has(flags::RST) {
            return packet;
        }
        track.acked = s.has(flags::ACK).then_some(s.ack).or(track.acked);
        if (s.window == 0) != (track.ours == 0) {
            self.seen.note(match s.window {
                0 => Seen::WindowClosed,
                _ => Seen::WindowReopened,
            });
        }
        track.ours = s.window;
        // Also of a FIN that lies beyond the window and is cut off.
        if ends {
            track.fin.get_or_insert((believed.add(u32::MAX), 0));
        }
        let pushed = s.flags & (flags::PSH | flags::FIN) != 0;
        if len == 1 && s.payload[0] == 0 && s.seq.add(1) == track.sent && !pushed {
            // smoltcp's keepalive: a byte of garbage, which a far end that has not got the real one
            // yet would take for it. Others send none then. Where the real one is like it, it is harmless,
            // and may be a probe of a closed window.
            self.seen.note(Seen::Keepalive);
            return match track.una == track.sent || track.last == Some(0) {
                true => packet,
                false => offload::rewrite(&packet, |_, payload| payload.clear()),
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
        if believed.is_after(track.sent) {
            track.sent = believed;
        }
        let end = track::end(&s);
        if end == s.seq {
            let scale = self.scales.get(&s.tuple.reversed()).copied();
            let seq = track.acceptable(scale.unwrap_or(0));
            return offload::rewrite(&packet, |headers, _| headers.seq = seq);
        }
        track.sent_at = Some(now);
        if end.is_after(track.top) {
            track.top = end;
            let known = !s.has(flags::FIN) && track.sent == end;
            track.last = s.payload.last().copied().filter(|_| known);
        }
        if len > 1 && self.urgent.contains(&s.tuple.sport) && s.seq.raw().is_multiple_of(5) {
            self.seen.note(Seen::Urgent);
            let pointer = (s.seq.raw() % len + 1) as u16;
            track.urgents.insert(s.seq.add(u32::from(pointer)).raw());
            return offload::rewrite(&packet, |headers, _| {
                headers.flags |= flags::URG;
                headers.urgent = pointer;
            });
        }
        packet
    }

    /// Leaves out what goes beyond the far end's window: smoltcp's fast retransmission is a whole segment,
    /// whatever the window. The numbers of what follows would lie beyond it, too, and where both ends do
    /// so neither takes anything from the other any more.
    fn within_window(&self, packet: Vec<u8>) -> Vec<u8> {
        let room = offload::tcp(&packet).and_then(|s| {
            let track = self.tracks.get(&s.tuple)?;
            track.room(&s, self.window_scale(&s.tuple))
        });
        let Some(room) = room else {
            return packet;
        };
        offload::rewrite(&packet, |headers, payload| {
            payload.truncate(room);
            headers.flags &= !(flags::FIN | flags::PSH);
        })
    }

    /// When the stack wants to work again.
    pub fn poll_at(&mut self, now: Time) -> Option<Time> {
        let at = self.interface.poll_at(instant(now), &self.sockets);
        let at = at.map(|at| Time::from_nanos(at.total_micros().max(0) as u64 * 1000));
        let due = self.tracks.values().filter_map(Track::due);
        at.into_iter().chain(due).min()
    }
}

fn instant(now: Time) -> Instant {
    Instant::from_micros((now.as_nanos() / 1000) as i64)
}

/// The window scale among a SYN's options.
pub(crate) fn scale_of(options: &[u8]) -> u8 {
    let scale = TcpOptionsIterator::from_slice(options).find_map(|option| match option {
        Ok(TcpOptionElement::WindowScale(scale)) => Some(scale),
        _ => None,
    });
    scale.unwrap_or(0)
}
