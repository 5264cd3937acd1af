//! A peer with a valid key that sends what it should not (SECURITY 6).

use super::*;

/// Host 0 believes that the whole world is behind host 1 and sends what it is given; host 1 knows
/// host 0 as 10.0.0.0/8 and fd00::/16, and another peer within that.
fn hostile() -> Pair {
    let mut pair = Pair::new();
    let any = |a: &str| Prefix::new(a.parse().unwrap(), 0).unwrap();
    let prefix = |a: &str, len| Prefix::new(a.parse().unwrap(), len).unwrap();
    let mut attacker = config(0, Integrity::On);
    attacker.peers[0].prefixes = vec![any("0.0.0.0"), any("::")];
    let mut victim = config(1, Integrity::On);
    victim.peers[0].prefixes = vec![prefix("10.0.0.0", 8), prefix("fd00::", 16)];
    victim.peers.push(PeerConfig {
        public: PublicKey::from(&StaticSecret::from([11; 32])),
        preshared: None,
        prefixes: vec![prefix("10.0.9.0", 24), prefix("fd00:9::", 32)],
        endpoints: Vec::new(),
    });
    victim.addresses.push("fd00:1::2".parse().unwrap());
    let make = |config, seed| Node::new(Time::ZERO, config, [seed; 32]).unwrap();
    pair.nodes = [make(attacker, 1), make(victim, 2)];
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

fn udp(src: &str, dst: &str) -> Vec<u8> {
    ip(src, dst, 17, b"", &[0, 1, 0, 2, 0, 8, 0, 0])
}

fn icmp(kind: u8, quoted: &[u8]) -> Vec<u8> {
    [&[kind, 0, 0, 0, 0, 0, 0, 0], quoted].concat()
}

/// Whether a packet that host 0 sends comes out at host 1; if not, it is counted.
fn comes_out(pair: &mut Pair, packet: &[u8]) -> bool {
    let refused = |pair: &Pair| pair.nodes[1].counters().get(Counter::InnerAddress);
    let before = (pair.injected[1].len(), refused(pair));
    let node = &mut pair.nodes[0];
    let mut buffer = node.tun_buffer();
    buffer[..virtio::LEN].fill(0);
    buffer[virtio::LEN..][..packet.len()].copy_from_slice(packet);
    node.handle_tun(pair.now, BUMP, buffer, virtio::LEN + packet.len());
    pair.run(Duration::from_millis(50));
    let out = pair.injected[1].len() - before.0;
    let counted = refused(pair) - before.1;
    assert_eq!(out as u64 + counted, 1, "out or counted: {packet:02x?}");
    out == 1
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
        assert_eq!(comes_out(&mut pair, &udp(src, US)), passes, "{src}");
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
        assert_eq!(comes_out(&mut pair, &udp(src, US_6)), passes, "{src}");
    }
}

#[test]
fn a_wide_prefix_does_not_speak_for_impossible_sources() {
    let mut pair = hostile();
    let any = |a: &str| Prefix::new(a.parse().unwrap(), 0).unwrap();
    pair.nodes[1].peers[0].prefixes = vec![any("0.0.0.0"), any("::")];
    assert!(comes_out(&mut pair, &udp("192.0.2.1", US)));
    for src in [
        "127.0.0.1",
        "0.0.0.0",
        "255.255.255.255",
        "224.0.0.1",
        US,
        "10.0.9.1",
    ] {
        assert!(!comes_out(&mut pair, &udp(src, US)), "{src}");
    }
    for src in ["::1", "::", "ff02::1", US_6, "fd00:9::1"] {
        assert!(!comes_out(&mut pair, &udp(src, US_6)), "{src}");
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
        assert!(!comes_out(&mut pair, &udp(PEER, dst)), "{dst}");
    }
    for dst in ["fd00:1::3", "::1", "ff02::1", "fe80::1"] {
        assert!(!comes_out(&mut pair, &udp(PEER_6, dst)), "{dst}");
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

#[test]
fn no_redirects_and_errors_only_about_packets_of_ours() {
    let mut pair = hostile();
    let ours = udp(US, PEER);
    let ours_6 = udp(US_6, PEER_6);
    let mut passes = |body: Vec<u8>| comes_out(&mut pair, &ip(PEER, US, 1, b"", &body));
    assert!(passes(icmp(8, b"echo")));
    assert!(!passes(icmp(5, &ours)), "redirect");
    for error in [3, 4, 11, 12] {
        assert!(passes(icmp(error, &ours)), "{error}");
        assert!(!passes(icmp(error, &udp(PEER, US))), "not sent by us");
        assert!(
            !passes(icmp(error, &udp(US, "192.0.2.1"))),
            "not to the peer"
        );
        assert!(
            !passes(icmp(error, &udp(US, "10.0.9.1"))),
            "to another peer"
        );
        assert!(!passes(icmp(error, &ours[..16])), "cut short");
        assert!(!passes(icmp(error, b"")));
    }
    assert!(!passes(Vec::new()), "no type at all");

    let mut passes = |next: u8, body: Vec<u8>| {
        let packet = ip(PEER_6, US_6, next, b"", &body);
        comes_out(&mut pair, &packet)
    };
    let extension = |next: u8, rest: Vec<u8>| [&[next, 0, 1, 4, 0, 0, 0, 0][..], &rest].concat();
    let fragment = |offset: u16, rest: Vec<u8>| {
        let [high, low] = (offset << 3 | 1).to_be_bytes();
        [&[58, 0, high, low, 0, 0, 0, 9][..], &rest].concat()
    };
    assert!(passes(58, icmp(128, b"echo")));
    assert!(passes(58, icmp(3, &ours_6)));
    assert!(passes(0, extension(60, extension(58, icmp(128, b"echo")))));
    assert!(passes(44, fragment(0, icmp(128, b"echo"))));
    assert!(
        passes(44, fragment(9, icmp(137, b"rest"))),
        "a later fragment has no type"
    );
    for kind in 133..=137 {
        assert!(!passes(58, icmp(kind, &ours_6)), "{kind}");
        assert!(
            !passes(0, extension(58, icmp(kind, &ours_6))),
            "hidden {kind}"
        );
        let twice = extension(60, extension(58, icmp(kind, &ours_6)));
        assert!(!passes(0, twice), "hidden twice: {kind}");
        assert!(
            !passes(44, fragment(0, icmp(kind, &ours_6))),
            "in a fragment: {kind}"
        );
    }
    for error in 1..5 {
        assert!(!passes(58, icmp(error, &udp(PEER_6, US_6))), "{error}");
        assert!(!passes(
            60,
            extension(58, icmp(error, &udp(US_6, "fd00:9::1")))
        ));
    }
    assert!(!passes(43, extension(17, vec![0; 8])), "a routing header");
    assert!(!passes(0, vec![58]), "cut within its headers");
    let mut many = icmp(137, b"");
    for at in 0..20 {
        many = extension(if at == 0 { 58 } else { 60 }, many);
    }
    assert!(!passes(60, many), "more headers than are looked through");
}

#[test]
fn no_detours() {
    let mut pair = hostile();
    let mut passes = |options: &[u8]| {
        let packet = ip(PEER, US, 17, options, &[0, 1, 0, 2, 0, 8, 0, 0]);
        comes_out(&mut pair, &packet)
    };
    assert!(passes(&[1, 1, 1, 0]));
    assert!(passes(&[7, 7, 4, 0, 0, 0, 0, 0]), "a route to be recorded");
    assert!(!passes(&[131, 7, 4, 10, 0, 1, 3, 0]), "loose source route");
    assert!(!passes(&[1, 137, 7, 4, 10, 0, 1, 3]), "strict source route");
    assert!(!passes(&[7, 0, 131, 7]), "malformed");
    assert!(!passes(&[7, 40, 4, 0]), "longer than the header");
}
