//! Whole packets from host to host, of which only acknowledgements without data are heard.

use std::io::ErrorKind;
use std::net::IpAddr;

use dibs_io::{PacketEar, PacketSender};
use dibs_netns::{HANG, isolated, wait_for};
use dibs_wire::emit::{self, Headers};
use dibs_wire::packet::{FlowKey, IpMeta, flags};
use dibs_wire::{SeqNumber, virtio};

use crate::two_hosts;

/// A TCP segment with these flags and so much payload.
fn segment([src, dst]: [IpAddr; 2], flags: u16, payload: usize) -> Vec<u8> {
    let headers = Headers {
        tuple: FlowKey::tcp((src, 40_000), (dst, 80)),
        meta: IpMeta {
            ttl: 64,
            ..IpMeta::default()
        },
        seq: SeqNumber::new(7),
        ack: SeqNumber::new(9),
        flags,
        window: 512,
        urgent: 0,
        timestamps: None,
        options: None,
    };
    let mut bytes = vec![0; headers.encoded_len() + payload];
    headers.write(&mut bytes, payload, 0);
    let (header, packet) = bytes.split_at_mut(virtio::LEN);
    let header = header.first_chunk().expect("a header was written");
    let header = virtio::VirtioHdr::decode(header).expect("it was just made");
    assert!(emit::complete_checksum(&header, packet));
    packet.to_vec()
}

#[test]
fn acknowledgements_are_heard_and_nothing_else() {
    isolated(|| {
        let (a, b) = two_hosts()?;
        for ends in [["10.0.1.1", "10.0.1.2"], ["fd00:1::1", "fd00:1::2"]] {
            let ends: [IpAddr; 2] = ends.map(|end| end.parse().expect("an address"));
            let [from, to] = ends;
            let is_v4 = from.is_ipv4();
            let sender = a.in_ns(|| PacketSender::open(is_v4, 0x0f00_0000))?;
            let many: Vec<IpAddr> = (0..100)
                .map(|last| IpAddr::from([10, 0, 9, last]))
                .collect();
            let others = [to, IpAddr::from([10, 0, 9, 9])];
            let port = [(40_000, 80)];
            let some_ports: Vec<(u16, u16)> = (0..300).map(|port| (40_000, port)).collect();
            let many_ports: Vec<(u16, u16)> = (0..600).map(|port| (1, port)).collect();
            let ears = [
                (&[from][..], &port[..]),
                (&[from, to], &some_ports),
                (&many, &many_ports),
                (&others, &port),
                (&[from], &[(80, 40_000), (40_000, 81)]),
            ];
            let ears =
                ears.map(|(sources, ports)| b.in_ns(|| PacketEar::open(is_v4, sources, ports)));
            let [one, two, any, none, no_port] = ears.map(|ear| ear.expect("an ear"));
            let ack = segment(ends, flags::ACK, 0);
            for other in [
                segment(ends, flags::ACK, 500),
                segment(ends, flags::SYN, 0),
                segment(ends, flags::ACK | flags::PSH, 0),
                segment(ends, flags::RST | flags::ACK, 0),
            ] {
                sender.send(from, to, &other)?;
            }
            sender.send(from, to, &ack)?;
            for ear in [one, two, any] {
                let heard = wait_for(HANG, "a packet", || match ear.hear() {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => None,
                    heard => Some(heard),
                });
                let (heard, interface) = heard??;
                // The kernel may number it.
                assert_eq!(heard[20..], ack[20..]);
                let name = b.in_ns(|| nix::net::if_::if_indextoname(interface))?;
                assert_eq!(name.to_str(), Ok("v"));
                let more = ear.hear().expect_err("nothing else");
                assert_eq!(more.kind(), ErrorKind::WouldBlock);
            }
            for deaf in [none, no_port] {
                let more = deaf
                    .hear()
                    .expect_err("it is of no host or port that was named");
                assert_eq!(more.kind(), ErrorKind::WouldBlock);
            }
            // A gateway sends in the names of others.
            let stranger = match is_v4 {
                true => "10.0.1.77".parse()?,
                false => "fd00:1::77".parse()?,
            };
            sender.send(stranger, to, &segment([stranger, to], flags::ACK, 0))?;
        }
        Ok(())
    });
}
