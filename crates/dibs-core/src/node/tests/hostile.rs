//! A peer with a valid key that sends what it should not (docs/threat-model.md, "The peer").

use super::*;

/// Host 0 believes that the whole world is behind host 1 and sends what it is given; host 1 knows
/// host 0 as 10.0.0.0/8 and fd00::/16, and another peer within that.
fn hostile() -> Pair {
    let mut pair = Pair::new();
    let any = |a: &str| IpNet::new(a.parse().unwrap(), 0).unwrap();
    let prefix = |a: &str, len| IpNet::new(a.parse().unwrap(), len).unwrap();
    let attacker = config(0, Integrity::On);
    let mut victim = config(1, Integrity::On);
    victim.peers[0].prefixes = vec![prefix("10.0.0.0", 8), prefix("fd00::", 16)];
    victim.peers.push(PeerConfig {
        public: PublicKey::from(&StaticSecret::from([11; 32])),
        preshared: None,
        prefixes: vec![prefix("10.0.9.0", 24), prefix("fd00:9::", 32)],
        accept: vec![Opening::ANY],
        endpoints: Vec::new(),
        appears_as: Vec::new(),
    });
    victim.addresses.push("fd00:1::2".parse().unwrap());
    let make = |config, seed| Node::new(Time::ZERO, config, [seed; 32]).unwrap();
    pair.nodes = [make(attacker, 1), make(victim, 2)];
    // Of a prefix of everything an honest node would leave out local networks.
    let everywhere = vec![any("0.0.0.0"), any("::")];
    pair.nodes[0].peers[0].hosts.set_prefixes(everywhere);
    pair.run(Duration::from_secs(3));
    pair.assert_open();
    pair
}

fn octets(addr: &str) -> Vec<u8> {
    match addr.parse().unwrap() {
        IpAddr::V4(a) => a.octets().to_vec(),
        IpAddr::V6(a) => a.octets().to_vec(),
    }
}

/// An IP packet; `options` of IPv4, a multiple of four bytes.
fn ip(src: &str, dst: &str, protocol: u8, options: &[u8], body: &[u8]) -> Vec<u8> {
    let (src, dst) = (octets(src), octets(dst));
    let mut packet = Vec::new();
    if src.len() == 4 {
        let total = 20 + options.len() + body.len();
        packet.extend([0x45 + (options.len() / 4) as u8, 0]);
        packet.extend((total as u16).to_be_bytes());
        packet.extend([0, 0, 0, 0, 64, protocol, 0, 0]);
    } else {
        packet.extend([0x60, 0, 0, 0]);
        packet.extend((body.len() as u16).to_be_bytes());
        packet.extend([protocol, 64]);
    }
    packet.extend(src);
    packet.extend(dst);
    packet.extend(options);
    packet.extend(body);
    packet
}

/// A TCP segment that is signed (RFC 2385), which nobody may cut.
fn segment(src: &str, dst: &str) -> Vec<u8> {
    let mut tcp = vec![0x9c, 0x40, 0, 80, 0, 0, 0, 1, 0, 0, 0, 1, 0xa0, 0x10, 1, 0];
    tcp.extend([0, 0, 0, 0, 1, 1, 19, 18]);
    tcp.extend([7; 16]);
    ip(src, dst, packet::TCP, b"", &tcp)
}

fn udp(src: &str, dst: &str) -> Vec<u8> {
    ip(src, dst, 17, b"", &[0, 1, 0, 2, 0, 8, 0, 0])
}

fn icmp(kind: u8, quoted: &[u8]) -> Vec<u8> {
    [&[kind, 0, 0, 0, 0, 0, 0, 0], quoted].concat()
}

/// The kernel of host 0 sends a packet.
fn hand_over(pair: &mut Pair, packet: &[u8]) {
    let node = &mut pair.nodes[0];
    let mut buffer = node.tun_buffer();
    buffer[..virtio::LEN].fill(0);
    buffer[virtio::LEN..][..packet.len()].copy_from_slice(packet);
    node.handle_tun(pair.now, BUMP, buffer, virtio::LEN + packet.len());
    pair.run(Duration::from_millis(50));
}

/// What host 1 counts a packet as that host 0 sends, although an honest node might not; none if it comes out.
fn refused_as(pair: &mut Pair, packet: &[u8]) -> Option<Counter> {
    let reasons = [Counter::InnerAddress, Counter::InnerProtocol];
    let counts = |pair: &Pair| reasons.map(|c| pair.nodes[1].counters().get(c));
    let before = (pair.injected[1].len(), counts(pair));
    match packet::parse(packet) {
        Ok(Packet::Opaque(_)) => {
            assert!(
                pair.nodes[0].peers[0]
                    .queues
                    .opaque
                    .plain
                    .push(BUMP, packet)
            );
            pair.run(Duration::from_millis(50));
        }
        _ => hand_over(pair, packet),
    }
    let out = pair.injected[1].len() - before.0;
    let counted = [0, 1].map(|at| counts(pair)[at] - before.1[at]);
    match (out, counted) {
        (1, [0, 0]) => None,
        (0, [1, 0]) => Some(reasons[0]),
        (0, [0, 1]) => Some(reasons[1]),
        _ => panic!("out or counted, once: {out}, {counted:?} of {packet:02x?}"),
    }
}

/// Whether a packet that host 0 sends comes out at host 1; if not, it is counted.
fn comes_out(pair: &mut Pair, packet: &[u8]) -> bool {
    refused_as(pair, packet).is_none()
}

const US: &str = "10.0.1.2";
const PEER: &str = "10.0.1.1";
const US_6: &str = "fd00:1::2";
const PEER_6: &str = "fd00:1::1";

#[test]
fn an_inner_source_is_one_of_the_peers_hosts() {
    let mut pair = hostile();
    for (src, passes) in [
        (PEER, true),
        ("10.200.3.4", true),
        // Another peer's, by the longer prefix.
        ("10.0.9.1", false),
        ("10.0.9.255", false),
        ("10.0.8.1", true),
        // Our own, as of the peer it would be.
        (US, false),
        ("192.0.2.1", false),
        ("127.0.0.1", false),
        ("0.0.0.0", false),
        ("255.255.255.255", false),
        ("224.0.0.1", false),
    ] {
        assert_eq!(comes_out(&mut pair, &segment(src, US)), passes, "{src}");
    }
    for (src, passes) in [
        (PEER_6, true),
        ("fd00:9::1", false),
        (US_6, false),
        ("fe80::1", false),
        ("::1", false),
        ("::", false),
        ("ff02::1", false),
        ("::ffff:10.0.1.1", false),
    ] {
        assert_eq!(comes_out(&mut pair, &segment(src, US_6)), passes, "{src}");
    }
}

#[test]
fn a_wide_prefix_does_not_speak_for_impossible_sources() {
    let mut pair = hostile();
    let any = |a: &str| IpNet::new(a.parse().unwrap(), 0).unwrap();
    pair.nodes[1].peers[0]
        .hosts
        .set_prefixes(vec![any("0.0.0.0"), any("::")]);
    assert!(comes_out(&mut pair, &segment("192.0.2.1", US)));
    for src in [
        "127.0.0.1",
        "0.0.0.0",
        "255.255.255.255",
        "224.0.0.1",
        US,
        "10.0.9.1",
    ] {
        assert!(!comes_out(&mut pair, &segment(src, US)), "{src}");
    }
    for src in ["::1", "::", "ff02::1", US_6, "fd00:9::1"] {
        assert!(!comes_out(&mut pair, &segment(src, US_6)), "{src}");
    }
}

#[test]
fn an_inner_destination_is_an_address_of_this_host() {
    let mut pair = hostile();
    for dst in [
        "10.0.1.3",
        "127.0.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "0.0.0.0",
        PEER,
    ] {
        assert!(!comes_out(&mut pair, &segment(PEER, dst)), "{dst}");
    }
    for dst in ["fd00:1::3", "::1", "ff02::1", "fe80::1"] {
        assert!(!comes_out(&mut pair, &segment(PEER_6, dst)), "{dst}");
    }
}

#[test]
fn a_connection_of_a_foreign_source_is_not_opened() {
    let mut pair = hostile();
    let mut port = 0;
    let mut segment = |src: &str, dst: &str, payload: &[u8]| {
        port += 1;
        let mut tcp = vec![
            0x9c, port, 0, 80, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 1, 0, 0, 0, 0, 0,
        ];
        tcp.extend(payload);
        comes_out(&mut pair, &ip(src, dst, 6, b"", &tcp))
    };
    for payload in [&b""[..], b"data"] {
        assert!(!segment("10.0.9.1", US, payload), "another peer's");
        assert!(!segment("192.0.2.1", US, payload));
        assert!(!segment(PEER, "10.0.1.3", payload));
    }
    assert!(segment(PEER, US, b""));
}

/// A peer's UDP or ICMP would have the local kernel's answers follow it into the bump.
#[test]
fn nothing_but_tcp_comes_out() {
    let mut pair = hostile();
    let tcp = &segment(PEER, US)[20..];
    let later = |mut packet: Vec<u8>| {
        // With an offset.
        packet[7] = 9;
        packet
    };
    for protocol in 0..=255 {
        let whole = ip(PEER, US, protocol, b"", tcp);
        let expected = (protocol != packet::TCP).then_some(Counter::InnerProtocol);
        assert_eq!(
            refused_as(&mut pair, &later(whole.clone())),
            expected,
            "{protocol}"
        );
        // As the first of several fragments.
        let mut first = whole;
        first[6] = 0x20;
        assert_eq!(refused_as(&mut pair, &first), expected, "{protocol}");
    }
    let protocol = Some(Counter::InnerProtocol);
    for other in [1, 17, 33, 47, 50, 51, 132, 136] {
        assert_eq!(
            refused_as(&mut pair, &ip(PEER, US, other, b"", tcp)),
            protocol
        );
    }
    assert_eq!(refused_as(&mut pair, &udp(PEER, US)), protocol);
    assert_eq!(refused_as(&mut pair, &udp(PEER_6, US_6)), protocol);

    let header = |next: u8, rest: &[u8]| [&[next, 0, 1, 4, 0, 0, 0, 0][..], rest].concat();
    let mut fate = |next: u8, body: &[u8]| {
        let packet = ip(PEER_6, US_6, next, b"", body);
        refused_as(&mut pair, &packet)
    };
    let (hop_by_hop, fragment, esp, ah, destination) = (0, 44, 50, 51, 60);
    for front in [hop_by_hop, destination] {
        assert_eq!(fate(front, &header(packet::TCP, tcp)), None);
        assert_eq!(fate(front, &header(17, tcp)), protocol);
        assert_eq!(
            fate(front, &header(destination, &header(packet::TCP, tcp))),
            None
        );
    }
    for offset in [0, 9] {
        let piece = |next: u8| [&[next, 0, 0, offset << 3 | 1, 0, 0, 0, 9][..], tcp].concat();
        assert_eq!(fate(fragment, &piece(packet::TCP)), None);
        assert_eq!(
            fate(hop_by_hop, &header(fragment, &piece(packet::TCP))),
            None
        );
        for other in [17, packet::ICMPV6, esp, ah, destination, fragment] {
            assert_eq!(fate(fragment, &piece(other)), protocol, "{other}");
        }
    }
    for front in [esp, ah, 59, 135, 139, 140] {
        assert_eq!(fate(front, &header(packet::TCP, tcp)), protocol, "{front}");
    }
    assert_eq!(
        fate(hop_by_hop, &[packet::TCP]),
        protocol,
        "cut within its headers"
    );
    let mut many = tcp.to_vec();
    for at in 0..20 {
        many = header(if at == 0 { packet::TCP } else { destination }, &many);
    }
    assert_eq!(
        fate(destination, &many),
        protocol,
        "more headers than are looked through"
    );
}

#[test]
fn no_echo_no_redirects_and_errors_only_about_segments_of_ours() {
    let mut pair = hostile();
    let ours = segment(US, PEER);
    let ours_6 = segment(US_6, PEER_6);
    let mut fate = |body: Vec<u8>| refused_as(&mut pair, &ip(PEER, US, 1, b"", &body));
    let (address, protocol) = (Some(Counter::InnerAddress), Some(Counter::InnerProtocol));
    for other in [0, 5, 8, 9, 10, 13, 14, 17] {
        assert_eq!(fate(icmp(other, &ours)), protocol, "{other}");
    }
    for error in [3, 4, 11, 12] {
        assert_eq!(fate(icmp(error, &ours)), None, "{error}");
        assert_eq!(
            fate(icmp(error, &ours[..28])),
            None,
            "as little as there has to be"
        );
        assert_eq!(fate(icmp(error, &udp(US, PEER))), protocol, "about UDP");
        assert_eq!(
            fate(icmp(error, &segment(PEER, US))),
            address,
            "not sent by us"
        );
        for other in ["192.0.2.1", "10.0.9.1"] {
            assert_eq!(
                fate(icmp(error, &segment(US, other))),
                address,
                "to {other}"
            );
        }
        for cut in 0..20 {
            assert_eq!(fate(icmp(error, &ours[..cut])), protocol, "{cut} bytes");
        }
        assert_eq!(fate(icmp(error, &ours_6)), protocol, "of the other version");
    }
    assert_eq!(fate(Vec::new()), protocol, "no type at all");
    let mut pieces = ip(PEER, US, 1, b"", &icmp(3, &ours));
    pieces[6] = 0x20;
    assert_eq!(refused_as(&mut pair, &pieces), protocol, "in fragments");

    let mut fate = |next: u8, body: Vec<u8>| {
        let packet = ip(PEER_6, US_6, next, b"", &body);
        refused_as(&mut pair, &packet)
    };
    let extension = |next: u8, rest: Vec<u8>| [&[next, 0, 1, 4, 0, 0, 0, 0][..], &rest].concat();
    let fragment = |rest: Vec<u8>| [&[58, 0, 0, 0, 0, 0, 0, 9][..], &rest].concat();
    for kind in [128, 129].into_iter().chain(133..=137) {
        let message = icmp(kind, &ours_6);
        assert_eq!(fate(58, message.clone()), protocol, "{kind}");
        let hidden = extension(58, message.clone());
        assert_eq!(fate(0, hidden.clone()), protocol, "hidden: {kind}");
        assert_eq!(
            fate(0, extension(60, hidden)),
            protocol,
            "hidden twice: {kind}"
        );
        assert_eq!(
            fate(44, fragment(message)),
            protocol,
            "in a fragment: {kind}"
        );
    }
    // What a segment looks like that went with options, or in fragments.
    let with_options = ip(US_6, PEER_6, 60, b"", &extension(6, ours_6[40..].to_vec()));
    let in_fragments = ip(US_6, PEER_6, 44, b"", &[6, 0, 0, 1, 0, 0, 0, 9]);
    for error in 1..5 {
        for about in [&ours_6, &with_options, &in_fragments] {
            assert_eq!(fate(58, icmp(error, about)), None, "{error}");
            assert_eq!(fate(60, extension(58, icmp(error, about))), None, "{error}");
        }
        assert_eq!(fate(58, icmp(error, &ours_6[..40])), None, "{error}");
        assert_eq!(fate(58, icmp(error, &ours_6[..39])), protocol, "{error}");
        assert_eq!(
            fate(58, icmp(error, &udp(US_6, PEER_6))),
            protocol,
            "{error}"
        );
        assert_eq!(
            fate(58, icmp(error, &segment(PEER_6, US_6))),
            address,
            "{error}"
        );
        let to_another = extension(58, icmp(error, &segment(US_6, "fd00:9::1")));
        assert_eq!(fate(60, to_another), address, "{error}");
        assert_eq!(
            fate(58, icmp(error, &ours)),
            protocol,
            "of the other version"
        );
    }
    assert_eq!(
        fate(43, extension(6, vec![0; 8])),
        address,
        "a routing header"
    );
}

/// Both ends ask the same, so what has no business in a TUN is dropped, and counted, where it went in.
#[test]
fn what_the_peer_would_refuse_is_not_sent() {
    let mut pair = Pair::connected();
    let mut goes = |packet: &[u8]| {
        let refused = |pair: &Pair| pair.nodes[0].counters().get(Counter::TunRefused);
        let before = (pair.injected[1].len(), refused(&pair));
        hand_over(&mut pair, packet);
        let out = pair.injected[1].len() - before.0;
        let counted = refused(&pair) - before.1;
        assert_eq!(out as u64 + counted, 1, "out or counted: {packet:02x?}");
        out == 1
    };
    let message = |kind: u8, about: &[u8]| ip(PEER, US, 1, b"", &icmp(kind, about));
    assert!(goes(&segment(PEER, US)));
    assert!(goes(&message(3, &segment(US, PEER))));
    assert!(!goes(&udp(PEER, US)));
    assert!(!goes(&message(8, b"echo")));
    assert!(!goes(&message(3, &udp(US, PEER))));
    assert!(!goes(&message(3, &segment(PEER, US))), "about its own");
    assert!(!goes(&ip(PEER, US, 50, b"", &[0; 40])));
    let detour = [131, 7, 4, 10, 0, 1, 3, 0];
    assert!(!goes(&ip(PEER, US, 6, &detour, &segment(PEER, US)[20..])));
    let refused = [Counter::InnerAddress, Counter::InnerProtocol];
    assert_eq!(refused.map(|c| pair.nodes[1].counters().get(c)), [0, 0]);
}

#[test]
fn no_detours() {
    let mut pair = hostile();
    let mut passes = |options: &[u8]| {
        let packet = ip(PEER, US, 6, options, &segment(PEER, US)[20..]);
        comes_out(&mut pair, &packet)
    };
    assert!(passes(&[1, 1, 1, 0]));
    assert!(passes(&[7, 7, 4, 0, 0, 0, 0, 0]), "a route to be recorded");
    assert!(!passes(&[131, 7, 4, 10, 0, 1, 3, 0]), "loose source route");
    assert!(!passes(&[1, 137, 7, 4, 10, 0, 1, 3]), "strict source route");
    assert!(!passes(&[7, 0, 131, 7]), "malformed");
    assert!(!passes(&[7, 40, 4, 0]), "longer than the header");
}
