//! Hosts that call a connection by different names, because addresses are translated between them.

use dibs_wire::packet::TCP;

use super::*;

/// Address of host 0, as of many another host.
const PRIVATE: [u8; 4] = [192, 168, 1, 10];
/// Address of host 0 at host 1.
const LENT: [u8; 4] = [10, 77, 0, 2];
/// Address of host 1 at host 0; no interface of host 1 has it.
const PUBLIC: [u8; 4] = [203, 0, 113, 7];

/// Host 0 has an address of its own network alone, and calls host 1 by one that is translated.
fn translated() -> Pair {
    let mut pair = Pair::new();
    let mut config_0 = config(0, Integrity::On);
    config_0.addresses = vec![PRIVATE.into(), [192, 168, 2, 20].into()];
    config_0.peers[0].prefixes = vec![IpNet::from(IpAddr::from(PUBLIC))];
    let mut config_1 = config(1, Integrity::On);
    config_1.peers[0].prefixes = vec![IpNet::from(IpAddr::from(LENT))];
    config_1.peers[0].appears_as = vec![LENT.into()];
    config_1.paths[1].public = vec![PUBLIC.into()];
    config_1.addresses = vec![addr(1, 1).ip()];
    config_1.reachable = config_1.addresses.clone();
    for (host, config) in [config_0, config_1].into_iter().enumerate() {
        pair.nodes[host] = Node::new(Time::ZERO, config, [host as u8 + 1; 32]).unwrap();
    }
    pair.run(Duration::from_secs(3));
    pair.assert_open();
    pair
}

/// The connection from a port of host 0, as the kernels of both hosts call it: its ends, as that host sends.
fn ends(port: u16) -> [FlowKey; 2] {
    let here = FlowKey::tcp((PRIVATE, port), (PUBLIC, 443));
    let there = FlowKey::tcp((addr(1, 1).ip(), 443), (LENT, port));
    [here, there]
}

/// The kernel of `host` sends this; what comes out at the other one, as segments.
fn passes(pair: &mut Pair, host: usize, sent: (FlowKey, u16, &[u8])) -> Vec<(FlowKey, Vec<u8>)> {
    let (tuple, bits, payload) = sent;
    let headers = Headers {
        tuple,
        meta: IpMeta {
            tos: 0,
            ttl: 64,
            flow_label: 0,
        },
        seq: SeqNumber::new(1000),
        ack: SeqNumber::new(0),
        flags: bits,
        window: WINDOW,
        urgent: 0,
        timestamps: None,
        options: None,
    };
    let mut buffer = pair.nodes[host].tun_buffer();
    let at = headers.encoded_len();
    headers.write(&mut buffer[..MAX_HEADERS], payload.len(), 0);
    buffer[at..at + payload.len()].copy_from_slice(payload);
    pair.nodes[host].handle_tun(pair.now, pair.bump, buffer, at + payload.len());
    pair.run(Duration::from_millis(100));
    let frames = pair.injected[1 - host].drain(..);
    frames
        .map(|frame| match packet::parse(&frame[virtio::LEN..]) {
            Ok(Packet::Tcp(segment)) => (segment.tuple, segment.payload.to_vec()),
            other => panic!("not a segment: {other:?}"),
        })
        .collect()
}

#[test]
fn each_kernel_sees_the_connection_by_its_own_name() {
    let mut pair = translated();
    let [here, there] = ends(40_000);
    let syn = passes(&mut pair, 0, (here, flags::SYN, b""));
    assert_eq!(syn, [(there.reversed(), Vec::new())]);
    let answer = passes(&mut pair, 1, (there, flags::SYN | flags::ACK, b""));
    assert_eq!(answer, [(here.reversed(), Vec::new())]);
    for (host, key) in [(0, here), (1, there)] {
        let data = passes(&mut pair, host, (key, flags::ACK, b"some data"));
        let named = [here, there][1 - host].reversed();
        assert_eq!(data, [(named, b"some data".to_vec())]);
    }
    let conns = pair.nodes[1].conns();
    assert_eq!((conns[0].tuple, conns[0].theirs), (there, here.reversed()));
    for node in &pair.nodes {
        assert_eq!(node.counters().get(Counter::InnerAddress), 0);
    }
}

/// An address that is translated on the way is learnt from the joins of paths, too.
#[test]
fn the_address_by_which_the_peer_asked_for_a_path_is_this_hosts() {
    let mut pair = translated();
    let called = addr(1, 1).ip();
    let here = FlowKey::tcp((PRIVATE, 40_000), (called, 443));
    // Not by the name that the setup gives it.
    pair.nodes[0].peers[0]
        .hosts
        .set_prefixes(vec![IpNet::from(called)]);
    pair.nodes[1].shared.setup.own.addresses = vec![[10, 9, 9, 9].into()];
    pair.nodes[1].shared.setup.own.reachable = vec![[10, 9, 9, 9].into()];
    pair.nodes[1].set_path_addresses(pair.now, 1, vec![[10, 9, 9, 9].into()]);
    let syn = passes(&mut pair, 0, (here, flags::SYN, b""));
    let there = FlowKey::tcp((LENT, 40_000), ([10, 9, 9, 9], 443));
    assert_eq!(syn, [(there, Vec::new())]);
}

#[test]
fn a_host_with_two_addresses_keeps_its_connections_apart() {
    let mut pair = translated();
    let [here, there] = ends(40_000);
    let other = FlowKey::tcp(([192, 168, 2, 20], 40_000), (PUBLIC, 443));
    let first = passes(&mut pair, 0, (here, flags::SYN, b""));
    let second = passes(&mut pair, 0, (other, flags::SYN, b""));
    assert_eq!(first[0].0, there.reversed());
    let port = second[0].0.sport;
    assert_ne!(port, 40_000, "the port is taken");
    assert_eq!(second[0].0, ends(port)[1].reversed());
    // It keeps its name, and is answered.
    let again = passes(&mut pair, 0, (other, flags::ACK, b"again"));
    assert_eq!(again[0].0.sport, port);
    let answer = passes(&mut pair, 1, (ends(port)[1], flags::ACK, b"answer"));
    assert_eq!(answer, [(other.reversed(), b"answer".to_vec())]);
}

/// The next instance has the port from the one before, whichever connection speaks first.
#[test]
fn a_host_that_begins_anew_keeps_the_connections_of_one_port_apart() {
    let mut pair = translated();
    let [here, there] = ends(40_000);
    let other = FlowKey::tcp(([192, 168, 2, 20], 40_000), (PUBLIC, 443));
    passes(&mut pair, 0, (here, flags::SYN, b""));
    let port = passes(&mut pair, 0, (other, flags::SYN, b""))[0].0.sport;
    let mut told = std::mem::take(&mut pair.events[1]).into_iter();
    let moved = told.find_map(|event| match event {
        Event::MovedPorts { peer: 0, ports } => Some(ports),
        _ => None,
    });
    let moved = moved.expect("a port is another one");
    let expected = MovedPort {
        ours: ends(port)[1],
        theirs: other.reversed(),
    };
    assert_eq!(moved, [expected]);
    // Nothing is known of them but that.
    pair.run(Duration::from_secs(20 * 60));
    assert_eq!(pair.nodes[1].peers[0].flows.len(), 0);
    pair.nodes[1].peers[0].flows = super::super::flows::FlowTable::new((1, 2));
    let mut foreign = expected;
    foreign.ours.dst = [10, 77, 0, 3].into();
    pair.nodes[1].set_moved_ports(0, &[foreign, expected]);
    for (ours, named) in [(other, ends(port)[1]), (here, there)] {
        let again = passes(&mut pair, 0, (ours, flags::ACK, b"again"));
        assert_eq!(again, [(named.reversed(), b"again".to_vec())]);
    }
}

/// A SYN with data is carried whole, and so is an error about a segment.
#[test]
fn what_is_carried_whole_is_translated() {
    let mut pair = translated();
    let [here, there] = ends(40_000);
    let open = passes(&mut pair, 0, (here, flags::SYN, b"fast open"));
    assert_eq!(open, [(there.reversed(), b"fast open".to_vec())]);
    let answer = passes(&mut pair, 1, (there, flags::SYN | flags::ACK, b""));
    assert_eq!(answer, [(here.reversed(), Vec::new())]);

    let rejected = {
        let mut quoted = vec![0; 28];
        quoted[..10].copy_from_slice(&[0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, TCP]);
        let octets = |ip: IpAddr| match ip {
            IpAddr::V4(ip) => ip.octets(),
            IpAddr::V6(_) => unreachable!("inner addresses here are IPv4"),
        };
        quoted[12..16].copy_from_slice(&LENT);
        quoted[16..20].copy_from_slice(&octets(there.src));
        quoted[20..22].copy_from_slice(&40_000_u16.to_be_bytes());
        quoted[22..24].copy_from_slice(&443_u16.to_be_bytes());
        let mut error = vec![0; virtio::LEN + 28];
        let packet = &mut error[virtio::LEN..];
        packet[..10].copy_from_slice(&[0x45, 0, 0, 56, 0, 0, 0x40, 0, 64, packet::ICMP]);
        packet[12..16].copy_from_slice(&octets(there.src));
        packet[16..20].copy_from_slice(&LENT);
        packet[20..22].copy_from_slice(&[3, 3]);
        error.extend(quoted);
        error
    };
    let mut buffer = pair.nodes[1].tun_buffer();
    buffer[..rejected.len()].copy_from_slice(&rejected);
    pair.nodes[1].handle_tun(pair.now, BUMP, buffer, rejected.len());
    pair.run(Duration::from_millis(100));
    let came = pair.injected[0].pop().expect("the error comes out");
    let Ok(Packet::Opaque(error)) = packet::parse(&came[virtio::LEN..]) else {
        panic!("not an error");
    };
    assert_eq!((error.src, error.dst), (PUBLIC.into(), PRIVATE.into()));
    assert_eq!(inner::rejected(&error), Some(here));
}

#[test]
fn a_name_goes_with_its_connection() {
    let mut pair = translated();
    let [here, there] = ends(40_000);
    passes(&mut pair, 0, (here, flags::SYN, b""));
    let theirs = here.reversed();
    let flows = &pair.nodes[1].peers[0].flows;
    assert_eq!(flows.theirs_of(&there), Some(theirs));
    pair.run(Duration::from_secs(20 * 60));
    let flows = &pair.nodes[1].peers[0].flows;
    assert_eq!(flows.len(), 0, "it was silent for long");
    assert_eq!(flows.theirs_of(&there), None);
    assert_eq!(flows.ours_of(&theirs), None);
}

/// Nobody speaks for an address of this host, or of another peer, by being called otherwise.
#[test]
fn an_address_that_stands_for_others_lets_nobody_in_elsewhere() {
    let mut pair = translated();
    let [here, _] = ends(40_000);
    for to in [[10, 9, 9, 9], [127, 0, 0, 1], LENT] {
        // Host 0 may send anything.
        pair.nodes[0].peers[0]
            .hosts
            .set_prefixes(vec![IpNet::from(IpAddr::from(to))]);
        let sent = FlowKey {
            dst: to.into(),
            ..here
        };
        let came = passes(&mut pair, 0, (sent, flags::SYN, b""));
        assert_eq!(came, []);
    }
    assert!(pair.nodes[1].counters().get(Counter::InnerAddress) >= 3);
}

/// The connection began in plain, through a router that gave host 0 an address that host 1 has never heard of.
#[test]
fn a_live_connection_that_was_matched_is_called_by_the_routers_address() {
    let mut pair = translated();
    let [here, _] = ends(40_000);
    let there = FlowKey::tcp((addr(1, 1).ip(), 443), ([198, 51, 100, 9], 61_000));
    pair.nodes[1].match_names(0, there, here.reversed());
    for (host, key) in [(0, here), (1, there), (0, here)] {
        let data = passes(&mut pair, host, (key, flags::ACK, b"some data"));
        let named = [here, there][1 - host].reversed();
        assert_eq!(data, [(named, b"some data".to_vec())]);
    }
    // A message about it is understood, too.
    assert_eq!(pair.nodes[1].theirs(0, there), here.reversed());
    assert_eq!(pair.nodes[1].ours(0, here.reversed()), there);
    pair.nodes[1].forget_match(0, there);
    let data = passes(&mut pair, 1, (there, flags::ACK, b"more"));
    assert_eq!(data, []);
    assert_eq!(pair.nodes[1].counters().get(Counter::TunNoPeer), 1);
}

/// Hosts that have matched a connection whose ends were those of an earlier one, which began on the bump; and what each calls it.
fn called_as_an_earlier_one() -> (Pair, [FlowKey; 2]) {
    let mut pair = translated();
    let [here, lent] = ends(40_000);
    let syn = passes(&mut pair, 0, (here, flags::SYN, b""));
    assert_eq!(syn, [(lent.reversed(), Vec::new())]);
    let there = FlowKey::tcp((addr(1, 1).ip(), 443), ([198, 51, 100, 9], 61_000));
    pair.nodes[1].match_names(0, there, here.reversed());
    (pair, [here, there])
}

/// The ends were those of a connection that began on the bump; the next one began in plain, and comes there by another bump.
#[test]
fn what_comes_from_plain_is_not_the_connection_that_had_its_ends() {
    let (mut pair, [here, there]) = called_as_an_earlier_one();
    for (host, key) in [(0, here), (1, there)] {
        let now = pair.now;
        let node = &mut pair.nodes[host];
        node.enter(now, bump::SEAL, key, None);
        node.enter(now, BUMP, key, Some(bump::SEAL));
    }
    for data in [&b"some data"[..], b"more"] {
        let came = passes(&mut pair, 0, (here, flags::ACK, data));
        assert_eq!(came, [(there.reversed(), data.to_vec())]);
    }
    // The end of the earlier one takes nothing from it.
    pair.run(Duration::from_secs(1));
    let flows = &pair.nodes[1].peers[0].flows;
    assert!({ flows.iter() }.all(|(_, conn)| conn.inc.is_none() || flows.tuple_of(conn) == there));
}

/// The same where host 0 does not know that it comes from plain: its kernel followed what came by the bump.
#[test]
fn what_was_opened_by_a_name_that_another_connection_has_now_is_opened_anew() {
    let (mut pair, [here, there]) = called_as_an_earlier_one();
    // The first is lost, and host 1 says so.
    for expected in [vec![], vec![(there.reversed(), b"some data".to_vec())]] {
        let came = passes(&mut pair, 0, (here, flags::ACK, b"some data"));
        assert_eq!(came, expected);
    }
}

/// The next one begins by another bump, and its kernel speaks only later by the bump that the earlier one was on.
#[test]
fn a_connection_that_begins_by_another_bump_is_not_called_as_the_earlier_one() {
    let mut pair = translated();
    let [here, lent] = ends(40_000);
    let there = FlowKey::tcp((addr(1, 1).ip(), 443), ([198, 51, 100, 9], 61_000));
    pair.nodes[1].match_names(0, there, here.reversed());
    let earlier = passes(&mut pair, 0, (here, flags::ACK, b"some data"));
    assert_eq!(earlier, [(there.reversed(), b"some data".to_vec())]);
    pair.bump = bump::SEAL;
    let syn = passes(&mut pair, 0, (here, flags::SYN, b""));
    assert_eq!(syn, [(lent.reversed(), Vec::new())]);
    pair.bump = BUMP;
    let data = passes(&mut pair, 0, (here, flags::ACK, b"more"));
    assert_eq!(data, [(lent.reversed(), b"more".to_vec())]);
}

/// Host 1 has begun anew, and its kernel speaks first.
#[test]
fn a_host_that_forgot_what_the_peer_is_called_is_told() {
    let mut pair = translated();
    let called = addr(1, 1).ip();
    pair.nodes[0].peers[0]
        .hosts
        .set_prefixes(vec![IpNet::from(called)]);
    let here = FlowKey::tcp((PRIVATE, 40_000), (called, 443));
    let [_, there] = ends(40_000);
    for (host, key, bits) in [(0, here, flags::SYN), (1, there, flags::SYN | flags::ACK)] {
        assert_eq!(passes(&mut pair, host, (key, bits, b"")).len(), 1);
    }
    let flows = &mut pair.nodes[1].peers[0].flows;
    let key = flows.find(there, BUMP).expect("it is there");
    flows.remove(key);
    // What the daemon of host 1 says of it is understood; what it says of others is said of no connection here.
    assert_eq!(pair.nodes[1].theirs(0, there), there);
    assert_eq!(pair.nodes[0].ours(0, there.reversed()), here);
    let [_, other] = ends(40_001).map(|ends| ends.reversed());
    assert_eq!(pair.nodes[0].ours(0, other), other);
    pair.run(Duration::from_secs(1));
    let asked = passes(&mut pair, 1, (there, flags::ACK, b"some data"));
    assert_eq!(pair.nodes[0].counters().get(Counter::InnerAddress), 1);
    assert!(!asked.is_empty());
    // The kernel of host 0 is asked where it stands, by its own name, and answers.
    assert!(
        asked
            .iter()
            .all(|(tuple, data)| *tuple == here.reversed() && data.is_empty())
    );
    // Both have to open their flows anew before one side's bytes arrive.
    let mut came = Vec::new();
    for _ in 0..3 {
        passes(&mut pair, 0, (here, flags::ACK, b""));
        came.extend(passes(&mut pair, 1, (there, flags::ACK, b"some data")));
    }
    assert!(came.contains(&(here.reversed(), b"some data".to_vec())));
}
