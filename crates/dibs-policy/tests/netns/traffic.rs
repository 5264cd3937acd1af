//! Which packets take the TUN, which the wire, and which nothing.

use std::io::Read;
use std::net::{TcpListener, UdpSocket};

use dibs_policy::conntrack::{Connection, Conntrack};
use dibs_policy::{Backstop, ClassRule, Known};
use nix::poll::PollFlags;
use socket2::{Domain, Socket, Type};

use crate::lab::{ENDS, Lab, accept, address, bump, connecting, marks, wait_for, wish};
use crate::packet::{ACK, SYN, UNREACHABLE, datagram, echo, syn};

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

pub(crate) fn what_has_the_own_mark_is_never_steered(lab: &Lab) {
    lab.steered(&wish());
    for (_, there) in ENDS {
        let to = address(there, 80);
        let listener = lab.peer_listens(80, there);
        let own = Socket::new(Domain::for_address(to), Type::STREAM, None).expect("a socket");
        own.set_mark(marks().own()).expect("a mark");
        own.connect(&to.into()).expect("the peer listens");
        accept(&listener);
        let _steered = connecting(to, None);
        assert_eq!(lab.tun_takes().destination, to);
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
        // The error answers a SYN that came by the TUN.
        let (program, answer) = match here.contains(':') {
            false => ("iptables", "icmp-port-unreachable"),
            true => ("ip6tables", "icmp6-port-unreachable"),
        };
        let reject = format!("-A INPUT -p tcp --dport 7 -j REJECT --reject-with {answer}");
        lab.iptables(program, &reject);
        lab.tun_gives(&syn(address(there, 7), address(here, 7)));
        let error = lab.tun_takes();
        assert!(UNREACHABLE.contains(&error.flags), "{error:?}");
        assert_eq!(error.destination, address(there, 0));
    }
}

/// A peer could give the datagrams of a resolver, and pings, its bump.
pub(crate) fn what_is_not_tcp_never_follows(lab: &Lab) {
    lab.steered(&wish());
    let mut backstop = lab.open(Backstop::open);
    lab.wait(backstop.set(&wish(), &Known::default()))
        .expect("a table of nftables");
    for (here, there) in ENDS {
        let far = lab.on_peer(|| UdpSocket::bind(address(there, 53)).expect("a socket"));
        let near = UdpSocket::bind(address(here, 9001)).expect("a socket");
        let arrives = |words: &[u8]| {
            near.send_to(words, address(there, 53)).expect("sent");
            wait_for(&far, PollFlags::POLLIN, "the datagram, by the wire");
            let mut buffer = [0; 16];
            let length = far.recv(&mut buffer).expect("a datagram");
            assert_eq!(&buffer[..length], words);
        };
        lab.tun_gives(&datagram(address(there, 53), address(here, 9001)));
        wait_for(&near, PollFlags::POLLIN, "what came by the TUN");
        arrives(b"answer");
        lab.tun_gives(&echo(address(there, 0).ip(), address(here, 0).ip()));
        // The TUN is read in order.
        lab.tun_gives(&datagram(address(there, 53), address(here, 9001)));
        near.recv(&mut [0; 16]).expect("the first");
        wait_for(
            &near,
            PollFlags::POLLIN,
            "what came behind the echo request",
        );
        let marked = |entry: Connection| (entry.mark != 0).then_some(entry);
        let mut conntrack = lab.open(Conntrack::open);
        let marked = lab.wait(conntrack.list(marked)).expect("a look");
        assert_eq!(marked, [], "neither UDP nor ICMP follows");

        // Nor does it where somebody else has marked it.
        let program = match here.contains(':') {
            false => "iptables",
            true => "ip6tables",
        };
        let bump = marks().bump(bump(1));
        let mark = format!("-t mangle -A OUTPUT -p udp -j CONNMARK --set-mark {bump:#x}");
        lab.iptables(program, &mark);
        arrives(b"marked");
        arrives(b"and again");
        let mark = mark.replace("-A", "-D");
        lab.iptables(program, &mark);
        lab.sh("conntrack -F 2>/dev/null");
    }
    assert_eq!(lab.wait(backstop.dropped()).expect("counted"), 0);
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
    lab.wait(steering.counting().drops())
        .expect("counters")
        .by_reason()[reason]
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
