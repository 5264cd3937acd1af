//! Bursts and acknowledgements as the packets of a TUN.

use std::net::{IpAddr, Ipv4Addr};

use dibs_netem::rng::Rng;
use dibs_wire::emit::{Headers, MAX_HEADERS};
use dibs_wire::packet::{self, IpMeta, Packet, flags};
use dibs_wire::virtio::{self, VirtioHdr};
use dibs_wire::{FlowKey, SeqNumber};
use etherparse::{TcpOptionElement, TcpOptionsIterator};

use super::segment::{Ack, BLOCKS, Burst, MSS};
use crate::payload::{Kind, Stream};

/// The window scale of both ends.
const SCALE: u32 = 7;

/// Where a host's packets come from.
pub(super) fn address(host: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 1, 0, host as u8 + 1))
}

/// Data that came out of a TUN as one packet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Data {
    /// Offset and length, and the payload of the segments that it stands for.
    pub(super) span: (u64, u64, u64),
    /// TSval and TSecr.
    pub(super) stamps: (u32, u32),
}

/// One connection from host 0 to host 1, which answers with acknowledgements only.
#[derive(Debug)]
pub(super) struct Wire {
    tuple: FlowKey,
    /// Where each host's numbers begin.
    first: [SeqNumber; 2],
    stream: Stream,
    scratch: Vec<u8>,
}

impl Wire {
    pub(super) fn new(rng: &mut Rng) -> Self {
        Self {
            tuple: FlowKey::tcp((address(0), 40_000), (address(1), 443)),
            first: [(); 2].map(|()| SeqNumber::new(rng.word() as u32)),
            stream: Stream {
                key: rng.word(),
                kind: Kind::Marked,
            },
            scratch: Vec::new(),
        }
    }

    /// Writes a burst as a superpacket; returns its length.
    pub(super) fn write_data(&self, burst: &Burst, buffer: &mut [u8]) -> usize {
        let headers = Headers {
            timestamps: Some((burst.tsval, burst.tsecr)),
            ..self.headers(0, burst.at)
        };
        let at = headers.encoded_len();
        let len = burst.len as usize;
        let gso = if burst.len > MSS { MSS as u16 } else { 0 };
        headers.write(&mut buffer[..MAX_HEADERS], len, gso);
        self.stream.fill(burst.at, &mut buffer[at..at + len]);
        at + len
    }

    /// Writes an acknowledgement; returns its length.
    pub(super) fn write_ack(&self, ack: &Ack, buffer: &mut [u8]) -> usize {
        let mut options = vec![1, 1, 8, 10];
        options.extend(ack.tsval.to_be_bytes());
        options.extend(ack.tsecr.to_be_bytes());
        if !ack.blocks.is_empty() {
            options.extend([1, 1, 5, 2 + 8 * ack.blocks.len() as u8]);
            for (from, to) in ack.blocks.iter().take(BLOCKS) {
                let edges = [from, to].map(|edge| self.first[0].add(*edge as u32).raw());
                options.extend(edges.into_iter().flat_map(u32::to_be_bytes));
            }
        }
        let headers = Headers {
            ack: self.first[0].add(ack.upto as u32),
            window: (ack.window >> SCALE).min(0xffff) as u16,
            options: Some(&options),
            ..self.headers(1, 0)
        };
        headers.write(&mut buffer[..MAX_HEADERS], 0, 0);
        headers.encoded_len()
    }

    fn headers(&self, host: usize, at: u64) -> Headers<'static> {
        Headers {
            tuple: match host {
                0 => self.tuple,
                _ => self.tuple.reversed(),
            },
            meta: IpMeta {
                ttl: 64,
                ..IpMeta::default()
            },
            seq: self.first[host].add(at as u32),
            ack: self.first[1 - host],
            flags: flags::ACK,
            window: 512,
            urgent: 0,
            timestamps: None,
            options: None,
        }
    }

    /// Reads what the receiver's kernel is given.
    ///
    /// # Errors
    /// It is none of this connection's, or a byte is not what was sent.
    pub(super) fn read_data(&mut self, frame: &[u8]) -> Result<Data, String> {
        let (header, segment) = read(frame, self.tuple)?;
        let len = segment.payload.len();
        let at = u64::from(segment.seq.distance_from(self.first[0]) as u32);
        self.scratch.resize(len, 0);
        self.stream.fill(at, &mut self.scratch);
        if self.scratch != segment.payload {
            return Err(format!("wrong bytes delivered among {len} at {at}"));
        }
        let mss = match header.gso_size {
            0 => len as u64,
            gso => u64::from(gso),
        };
        Ok(Data {
            span: (at, len as u64, mss),
            stamps: segment.timestamps.ok_or("time stamps are gone")?,
        })
    }

    /// Reads what the sender's kernel is given.
    ///
    /// # Errors
    /// It is none of this connection's.
    pub(super) fn read_ack(&self, frame: &[u8]) -> Result<Ack, String> {
        let (_, segment) = read(frame, self.tuple.reversed())?;
        let offset = |number: SeqNumber| u64::from(number.distance_from(self.first[0]) as u32);
        let (tsval, tsecr) = segment.timestamps.ok_or("time stamps are gone")?;
        let edge = |raw: u32| offset(SeqNumber::new(raw));
        let mut blocks = Vec::new();
        for option in TcpOptionsIterator::from_slice(segment.options) {
            if let Ok(TcpOptionElement::SelectiveAcknowledgement(first, others)) = option {
                let named = std::iter::once(first).chain(others.into_iter().flatten());
                blocks.extend(named.map(|(from, to)| (edge(from), edge(to))));
            }
        }
        Ok(Ack {
            upto: offset(segment.ack),
            window: u64::from(segment.window) << SCALE,
            blocks,
            tsval,
            tsecr,
        })
    }
}

fn read(frame: &[u8], tuple: FlowKey) -> Result<(VirtioHdr, packet::Segment<'_>), String> {
    let (header, bytes) =
        { frame.split_first_chunk::<{ virtio::LEN }>() }.ok_or("a short frame")?;
    let header = VirtioHdr::decode(header).map_err(|e| e.to_string())?;
    match packet::parse(bytes) {
        Ok(Packet::Tcp(segment)) if segment.tuple == tuple => Ok((header, segment)),
        other => Err(format!("not a segment of the connection: {other:?}")),
    }
}
