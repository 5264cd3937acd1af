//! Which packets take the TUN, which the wire, and which nothing.

use std::io::Read;
use std::net::{TcpListener, UdpSocket};

use dibs_policy::{ClassRule, Protocol};
use nix::poll::PollFlags;
use socket2::SockRef;

use crate::lab::{ENDS, Lab, accept, address, bump, connecting, marks, wait_for, wish};
use crate::packet::{ACK, SYN, UNREACHABLE, datagram, syn};

pub(crate) fn class_rules_send_new_connections_into_the_tun(lab: &Lab) {
    lab.steered(&wish());
    for (here, there) in ENDS {
        let _socket = connecting(address(there, 80), None);
        let packet = lab.tun_takes();
        assert_eq!(
            (packet.flags, packet.destination),
            (SYN, address(there, 80))
        );
        assert_eq!(packet.source.ip(), address(here, 0).ip());
        // Another port goes by the wire.
        lab.connected(81, there);
    }
}

pub(crate) fn own_datagrams_are_never_steered(lab: &Lab) {
    let mut wish = wish();
    wish.rules = vec![ClassRule {
        protocol: Protocol::Udp,
        ..ClassRule::tcp(1, bump(1))
    }];
    lab.steered(&wish);
    for (here, there) in ENDS {
        let far = lab.on_peer(|| UdpSocket::bind(address(there, 5300)).expect("a socket"));
        let near = UdpSocket::bind(address(here, 0)).expect("a socket");
        near.send_to(b"steered", address(there, 5300))
            .expect("sent");
        assert_eq!(lab.tun_takes().payload, b"steered");
        SockRef::from(&near)
            .set_mark(marks().own())
            .expect("a mark");
        near.send_to(b"own", address(there, 5300)).expect("sent");
        wait_for(&far, PollFlags::POLLIN, "the own datagram");
        let mut buffer = [0; 16];
        assert_eq!(far.recv(&mut buffer).expect("a datagram"), 3);
    }
}

pub(crate) fn what_comes_by_the_tun_is_followed(lab: &Lab) {
    lab.steered(&wish());
    // The strictest host: only the TUN's own setting lets this in.
    lab.sh("sysctl -qw net.ipv4.conf.all.rp_filter=1");
    for (here, there) in ENDS {
        let listener = TcpListener::bind(address(here, 9000)).expect("a listener");
        lab.tun_gives(&syn(address(there, 5555), address(here, 9000)));
        let answer = lab.tun_takes();
        assert_eq!(
            answer.flags,
            SYN | ACK,
            "the answer takes the way its question came"
        );
        assert_eq!(answer.destination, address(there, 5555));
        drop(listener);
    }
}

pub(crate) fn icmp_errors_go_with_their_connection(lab: &Lab) {
    lab.steered(&wish());
    for (here, there) in ENDS {
        // Nobody listens: the error answers a datagram that came by the TUN.
        lab.tun_gives(&datagram(address(there, 7), address(here, 7)));
        let error = lab.tun_takes();
        assert!(UNREACHABLE.contains(&error.flags), "{error:?}");
        assert_eq!(error.destination, address(there, 0));
    }
}

pub(crate) fn this_hosts_own_addresses_are_no_peers(lab: &Lab) {
    let mut wish = wish();
    wish.bumps[0].peers = ["10.7.0.0/16", "fd07::/16"]
        .map(|p| p.parse().expect("a prefix"))
        .into();
    wish.rules = vec![ClassRule::tcp(1, bump(1))];
    lab.steered(&wish);
    for (here, there) in ENDS {
        let listener = TcpListener::bind(address(here, 80)).expect("a listener");
        let _near = connecting(address(here, 80), None);
        accept(&listener);
        let _far = connecting(address(there, 80), None);
        assert_eq!(lab.tun_takes().destination, address(there, 80));
    }
}

pub(crate) fn the_tun_delivers_only_what_peers_may_send(lab: &Lab) {
    lab.steered(&wish());
    for ((here, there), (stranger, loopback, elsewhere)) in ENDS.into_iter().zip([
        ("10.7.1.9", "127.0.0.1", "10.8.0.1"),
        ("fd07:1::9", "::1", "fd08::1"),
    ]) {
        lab.sh("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1");
        lab.sh("sysctl -qw net.ipv4.conf.all.route_localnet=1");
        let _listeners =
            [here, loopback].map(|ip| TcpListener::bind(address(ip, 9000)).expect("a listener"));
        lab.tun_gives(&syn(address(stranger, 1), address(here, 9000)));
        lab.tun_gives(&syn(address(there, 2), address(loopback, 9000)));
        lab.tun_gives(&syn(address(there, 3), address(elsewhere, 9000)));
        lab.tun_gives(&syn(address(there, 4), address(here, 9000)));
        // Packets are handled in order: an answer to an earlier one would be out before.
        assert_eq!(lab.tun_takes().destination, address(there, 4));
        let family = if here.contains(':') {
            "ip6tables"
        } else {
            "iptables"
        };
        let drops = lab.iptables(
            family,
            "-t mangle -vxnL DIBS-IN-1 | awk '/DROP/ {print $1}'",
        );
        // The kernel itself refuses ::1 from outside, before any rule.
        let loopback = if here.contains(':') { "0" } else { "1" };
        let expected = [loopback, "0", "1", "1"];
        assert_eq!(
            drops.split_whitespace().collect::<Vec<_>>(),
            expected,
            "{family}"
        );
    }
}

pub(crate) fn the_guard_drops_what_leaves_elsewhere(lab: &Lab) {
    for (count, (_, there)) in (1..).zip(ENDS) {
        let mut steering = lab.steered(&wish());
        let dropped = |steering: &mut _| drops(lab, steering, "plain_out_marked");
        let before = dropped(&mut steering);
        let listener = lab.peer_listens(80, there);

        // A socket bound to a device is not moved by a mark.
        let bound = connecting(address(there, 80), Some("veth0"));
        assert!(
            dropped(&mut steering) > before,
            "bound to a device, round {count}"
        );
        drop(bound);

        // Without the RPDB rule the ordinary route is taken.
        let before = dropped(&mut steering);
        lab.sh("ip rule del priority 5200; ip -6 rule del priority 5200");
        let plain = connecting(address(there, 80), None);
        assert!(
            dropped(&mut steering) > before,
            "without the rule, round {count}"
        );
        drop(plain);

        // Nothing of it has arrived: the first to be accepted is the next, let through by hand.
        let family = if there.contains(':') {
            "ip6tables"
        } else {
            "iptables"
        };
        lab.iptables(family, "-t mangle -F DIBS-POSTROUTING");
        let free = connecting(address(there, 80), None);
        let arrived = accept(&listener).peer_addr().expect("a peer");
        assert_eq!(
            Some(arrived),
            free.local_addr().expect("an address").as_socket()
        );
    }
}

fn drops(lab: &Lab, steering: &mut dibs_policy::Steering, reason: &str) -> u64 {
    lab.wait(steering.drops()).expect("counters").by_reason()[reason]
}

pub(crate) fn plain_packets_are_refused_by_the_tun(lab: &Lab) {
    lab.steered(&wish());
    lab.sh("ip link set veth0 down");
    for (_, there) in ENDS {
        // Only the backup route is left. What is not marked gets an ICMP error...
        let plain = connecting(address(there, 81), None);
        wait_for(&plain, PollFlags::POLLOUT, "the refusal");
        let error = plain
            .take_error()
            .expect("a socket")
            .expect("refused")
            .raw_os_error();
        assert!(matches!(error, Some(libc::EHOSTUNREACH)), "{error:?}");
        // ... and what is marked the TUN.
        let mut steered = connecting(address(there, 80), None);
        assert_eq!(lab.tun_takes().destination, address(there, 80));
        assert!(steered.read(&mut [0]).is_err());
    }
}
