//! Who hears everything on both links, and knows the plaintext.

use std::ops::Range;
use std::time::SystemTime;

use anyhow::{Result, ensure};
use dibs_eavesdrop::{Link, Payload};
use dibs_lab::{Capture, Packet, Plaintext, Recording};
use dibs_netns::Host;
use etherparse::{IpNumber, LaxSlicedPacket};

/// Recordings of both links in progress.
#[derive(Debug)]
pub struct Eavesdropper {
    eth: Capture,
    wlan: Capture,
    from: SystemTime,
}

/// Packets that were heard on both links.
#[derive(Debug)]
pub struct Heard {
    /// On the trusted link.
    pub eth: Recording,
    /// On the untrusted link.
    pub wlan: Recording,
}

impl Eavesdropper {
    pub(crate) fn new(host: &Host) -> Result<Self> {
        Ok(Self {
            eth: Capture::start(host, "eth0")?,
            wlan: Capture::start(host, "wlan0")?,
            from: SystemTime::UNIX_EPOCH,
        })
    }

    /// Forgets what was heard so far.
    pub fn from_now(&mut self) {
        self.from = SystemTime::now();
    }

    /// Ends the recordings.
    ///
    /// # Errors
    /// If they are not complete.
    pub fn finish(self) -> Result<Heard> {
        Ok(Heard {
            eth: self.eth.finish()?,
            wlan: self.wlan.finish()?,
        })
    }

    /// Ends the recordings and checks that no part of 23 bytes of these streams was in plain, on
    /// either link, in `least` bytes or more.
    ///
    /// # Errors
    /// If there was, or too little passed to tell.
    pub fn heard_nothing(self, of: &[Plaintext], least: usize) -> Result<()> {
        let during = self.from..SystemTime::now();
        let heard = self.finish()?;
        let plain = heard.plain(of, &during);
        let bytes = heard.bytes(&during);
        ensure!(
            plain == [0, 0],
            "in plain: {} packets on eth, {} on wlan, of {:?}; the first: {}",
            plain[0],
            plain[1],
            during.end.duration_since(during.start).unwrap_or_default(),
            heard.first_plain(of, &during)
        );
        ensure!(bytes >= least, "only {bytes} bytes passed");
        Ok(())
    }
}

impl Heard {
    /// How many packets of this time carry a part of these streams: on the trusted link, on the
    /// untrusted one.
    pub fn plain(&self, of: &[Plaintext], during: &Range<SystemTime>) -> [usize; 2] {
        let holds = |packet: &&Packet| of.iter().any(|stream| stream.find(&packet.frame).is_some());
        [&self.eth, &self.wlan].map(|link| packets(link, during).filter(holds).count())
    }

    /// The first of these, as far as its headers go, and when it was heard.
    fn first_plain(&self, of: &[Plaintext], during: &Range<SystemTime>) -> String {
        let holds = |packet: &&Packet| of.iter().any(|stream| stream.find(&packet.frame).is_some());
        let all = [&self.eth, &self.wlan].into_iter();
        let mut all = all.flat_map(|link| packets(link, during).filter(holds));
        all.next().map_or_else(String::new, |packet| {
            let after = packet.at.duration_since(during.start).unwrap_or_default();
            format!("after {after:?}, {}", head(packet))
        })
    }

    /// How many TCP segments over IPv4 have this port at either end: on the trusted link, on the untrusted.
    pub fn segments(&self, port: u16) -> [usize; 2] {
        let has = |packet: &&Packet| has_port(packet, port);
        [&self.eth, &self.wlan].map(|link| link.packets.iter().filter(has).count())
    }

    /// Checks that no TCP segment over IPv4 had this port at either end, on either link.
    ///
    /// # Errors
    /// If one had, with the heads of the first few.
    pub fn no_segment(&self, port: u16) -> Result<()> {
        let counts = self.segments(port);
        let both = [&self.eth, &self.wlan].into_iter();
        let all = both.flat_map(|link| link.packets.iter());
        let heads = all.filter(|packet| has_port(packet, port)).take(4);
        let heads: String = heads.map(|packet| format!("\n{}", head(packet))).collect();
        ensure!(
            counts == [0, 0],
            "in plain, of port {port}: {counts:?}{heads}"
        );
        Ok(())
    }

    fn bytes(&self, during: &Range<SystemTime>) -> usize {
        let both = [&self.eth, &self.wlan].into_iter();
        both.flat_map(|link| packets(link, during))
            .map(|packet| packet.frame.len())
            .sum()
    }
}

fn packets<'a>(
    recording: &'a Recording,
    during: &'a Range<SystemTime>,
) -> impl Iterator<Item = &'a Packet> {
    let packets = recording.packets.iter();
    packets.filter(|packet| during.contains(&packet.at))
}

/// Whether it is a TCP segment over IPv4 with this port at either end.
fn has_port(packet: &Packet, port: u16) -> bool {
    let heard = dibs_eavesdrop::Packet::of(Link::Ethernet, &packet.frame);
    heard.is_some_and(|heard| {
        let is_tcp = matches!(heard.payload, Payload::Tcp(_)) && heard.from.is_ipv4();
        is_tcp && [heard.from.port(), heard.to.port()].contains(&port)
    })
}

/// True if an Ethernet frame is TCP over IPv4 or IPv6, whole or a piece of it.
pub fn is_tcp(frame: &[u8]) -> bool {
    let sliced = LaxSlicedPacket::from_ethernet(frame).ok();
    let ip = sliced.and_then(|sliced| sliced.net);
    let carried = ip.as_ref().and_then(|ip| ip.ip_payload_ref());
    carried.is_some_and(|carried| carried.ip_number == IpNumber::TCP)
}

/// A packet for people: when it passed, how long it was, and its headers.
fn head(packet: &Packet) -> String {
    let at = packet
        .at
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    let head = &packet.frame[..packet.frame.len().min(86)];
    let head: String = head.iter().map(|byte| format!("{byte:02x}")).collect();
    let way = if packet.outgoing { "sent" } else { "received" };
    format!(
        "{way} at {:.6}, {} bytes, {head}",
        at.as_secs_f64() % 86_400.0,
        packet.frame.len()
    )
}
