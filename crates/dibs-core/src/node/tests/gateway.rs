//! Hosts that forward for networks behind them: what of them may come out of the TUN.

use super::*;

const CLIENT: [u8; 4] = [192, 168, 7, 10];
const SERVER: [u8; 4] = [192, 168, 8, 10];

fn net(third: u8) -> IpNet {
    IpNet::new([192, 168, third, 0].into(), 24).unwrap()
}

/// Two gateways, each with a network behind it; `told` says which of them were told of their own.
fn gateways(told: [bool; 2]) -> Pair {
    let mut pair = Pair::new();
    for (host, told) in told.into_iter().enumerate() {
        let mut config = config(host, Integrity::On);
        // Wider than what is behind the other.
        let all = IpNet::new([192, 168, 0, 0].into(), 16).unwrap();
        config.peers[0].prefixes.push(all);
        let own = [net(7), net(8)][host];
        config.gateway = told.then_some(own).into_iter().collect();
        pair.nodes[host] = Node::new(Time::ZERO, config, [host as u8 + 1; 32]).unwrap();
    }
    pair.run(Duration::from_secs(3));
    pair.assert_open();
    pair
}

/// The kernel of host 0 forwards a segment; what comes out at the other.
fn forward(pair: &mut Pair, src: [u8; 4], dst: [u8; 4]) -> Vec<FlowKey> {
    let tuple = |frame: Vec<u8>| match packet::parse(&frame[virtio::LEN..]) {
        Ok(Packet::Tcp(segment)) => segment.tuple,
        other => panic!("not a segment: {other:?}"),
    };
    let frames = forward_as(pair, src, dst, b"from behind", 0);
    frames.into_iter().map(tuple).collect()
}

/// The same of a superpacket of segments of `mss` bytes, as frames.
fn forward_as(
    pair: &mut Pair,
    src: [u8; 4],
    dst: [u8; 4],
    payload: &[u8],
    mss: u16,
) -> Vec<Vec<u8>> {
    let headers = Headers {
        tuple: FlowKey::tcp((src, 40_000), (dst, 80)),
        meta: IpMeta {
            tos: 0,
            ttl: 63,
            flow_label: 0,
        },
        seq: SeqNumber::new(1),
        ack: SeqNumber::new(5),
        flags: flags::ACK,
        window: WINDOW,
        urgent: 0,
        timestamps: Some((1, 1)),
        options: None,
    };
    let mut buffer = pair.nodes[0].tun_buffer();
    let at = headers.encoded_len();
    headers.write(&mut buffer[..MAX_HEADERS], payload.len(), mss);
    buffer[at..at + payload.len()].copy_from_slice(payload);
    pair.nodes[0].handle_tun(pair.now, BUMP, buffer, at + payload.len());
    pair.run(Duration::from_millis(100));
    pair.injected[1].drain(..).collect()
}

#[test]
fn what_is_for_the_network_behind_comes_out_and_nothing_else() {
    let mut pair = gateways([true, true]);
    let out = forward(&mut pair, CLIENT, SERVER);
    assert_eq!(out.len(), 1);
    assert_eq!((out[0].src, out[0].dst), (CLIENT.into(), SERVER.into()));
    assert_eq!(pair.nodes[1].counters().get(Counter::InnerAddress), 0);

    // A host of the peer's cannot speak for one of ours, however wide the peer's prefixes are.
    let forged = [192, 168, 8, 11];
    assert_eq!(forward(&mut pair, forged, SERVER), []);
    assert!(pair.nodes[1].counters().get(Counter::InnerAddress) > 0);
}

#[test]
fn who_is_no_gateway_takes_nothing_for_others() {
    let mut pair = gateways([true, false]);
    assert_eq!(forward(&mut pair, CLIENT, SERVER), []);
    assert!(pair.nodes[1].counters().get(Counter::InnerAddress) > 0);
}

/// Where it goes from there nothing longer may fit, and nobody but the sender is told.
#[test]
fn what_comes_out_is_no_longer_than_its_sender_made_it() {
    let mut pair = gateways([true, true]);
    let payload = [7; 10_000];
    let out = forward_as(&mut pair, CLIENT, SERVER, &payload, 600);
    let mut total = 0;
    for frame in out {
        let gso_size = u16::from_ne_bytes([frame[4], frame[5]]);
        let Ok(Packet::Tcp(segment)) = packet::parse(&frame[virtio::LEN..]) else {
            panic!("not a segment: {frame:?}");
        };
        let longest = match gso_size {
            0 => segment.payload.len(),
            size => usize::from(size),
        };
        assert!(longest <= 600, "{longest} bytes");
        total += segment.payload.len();
    }
    assert_eq!(total, payload.len());
}

/// Host 1 is the exit of host 0, which has it lend the address of what comes from there.
fn exit() -> Pair {
    let mut pair = Pair::new();
    for host in [0, 1] {
        let mut config = config(host, Integrity::On);
        let everywhere = IpNet::new([0, 0, 0, 0].into(), 0).unwrap();
        match host {
            0 => {
                config.gateway = vec![net(7)];
                let named = IpNet::new([10, 9, 0, 0].into(), 16).unwrap();
                config.peers[0].prefixes.extend([everywhere, named]);
                config.peers[0].accept = vec![Opening::ANY];
            }
            _ => {
                config.exit = vec![everywhere];
                config.addresses.push([203, 0, 113, 8].into());
                config.peers[0].prefixes = vec![IpNet::from(IpAddr::from([10, 77, 0, 2]))];
                config.peers[0].appears_as = vec![[10, 77, 0, 2].into()];
                config.peers[0].accept.clear();
            }
        }
        pair.nodes[host] = Node::new(Time::ZERO, config, [host as u8 + 1; 32]).unwrap();
    }
    pair.run(Duration::from_secs(3));
    pair.assert_open();
    pair
}

/// A network of its own the client may call the server's, which the server then does not let it into.
#[test]
fn peers_reach_the_internet_by_an_exit_and_none_of_its_own_networks() {
    let mut pair = exit();
    let far = [93, 184, 216, 34];
    let out = forward(&mut pair, CLIENT, far);
    let ends: Vec<(IpAddr, IpAddr)> = out.iter().map(|out| (out.src, out.dst)).collect();
    assert_eq!(ends, [([10, 77, 0, 2].into(), far.into())]);

    let refused = pair.nodes[1].counters().get(Counter::InnerAddress);
    assert_eq!(forward(&mut pair, CLIENT, [10, 9, 3, 4]), []);
    assert!(pair.nodes[1].counters().get(Counter::InnerAddress) > refused);
    // Those that its prefix leaves out the client does not even send.
    for local in [
        [192, 168, 9, 1],
        [169, 254, 169, 254],
        [127, 0, 0, 1],
        [224, 0, 0, 5],
    ] {
        let sent = pair.nodes[0].counters().get(Counter::TunNoPeer);
        assert_eq!(forward(&mut pair, CLIENT, local), []);
        assert_eq!(
            pair.nodes[0].counters().get(Counter::TunNoPeer),
            sent + 1,
            "{local:?}"
        );
    }
}

#[test]
fn an_exit_reaches_nothing_that_is_local_or_a_peers_whatever_the_client_says() {
    let pair = exit();
    let setup = &pair.nodes[1].shared.setup;
    let beyond = |addr: &str| setup.is_beyond(addr.parse().unwrap());
    for closed in [
        "10.8.0.10",
        "10.77.0.2",
        "127.0.0.1",
        "169.254.169.254",
        "192.168.1.1",
        "100.64.0.1",
        "203.0.113.8",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::ffff:10.0.0.1",
    ] {
        assert!(!beyond(closed), "{closed}");
    }
    assert!(beyond("203.0.113.9"));
}
