//! Hosts that translate addresses, filter by route, bind sockets, answer with errors: connections go in and
//! out of bumps there too, or it is said clearly why not.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use dibs_netns::{HANG, Host};
use netns_tests::daemon::{SOON, wait};
use netns_tests::topology::{server, server_v6};
use netns_tests::traffic::{SETTLED, Talk, connect, next_plaintext};
use netns_tests::{Eavesdropper, Net, Setup, isolated};
use socket2::{Domain, Protocol, Socket, Type};

/// How long somebody tries to connect who is not to succeed.
const IN_VAIN: Duration = Duration::from_secs(2);

/// In by one host, out by the other, and in again; on the bump nothing is in plain.
fn in_and_out(net: &Net, port: u16) -> Result<()> {
    let talk = net.talk(port)?;
    talk.advance(256 << 10)?;
    net.a.enable(port)?;
    net.wait_bump(port, "scramble")?;
    talk.advance(SETTLED)?;
    net.b.switch("disable", "--sport", port)?;
    net.wait_bump(port, "plain")?;
    talk.advance(256 << 10)?;
    net.b.switch("enable", "--sport", port)?;
    net.wait_bump(port, "scramble")?;
    talk.advance(SETTLED)?;
    let ears = net.eavesdrop()?;
    talk.advance(SETTLED)?;
    ears.heard_nothing(&talk.plaintexts, SETTLED as usize)?;
    talk.finish()
}

fn with_rp_filter(value: u8) -> Result<()> {
    Setup::new().without_daemons().run(|net| {
        for node in [&net.a, &net.b] {
            for device in ["all", "default", "eth0", "wlan0"] {
                let key = format!("net.ipv4.conf.{device}.rp_filter");
                node.host.sysctl(&key, &value.to_string())?;
            }
        }
        net.start()?;
        in_and_out(net, 7000)?;
        // In the midst of it, too.
        let talk = net.talk(7001)?;
        net.a.enable(7001)?;
        net.wait_bump(7001, "scramble")?;
        for value in ["1", "2", "0"] {
            for node in [&net.a, &net.b] {
                node.host.sysctl("net.ipv4.conf.all.rp_filter", value)?;
            }
            talk.advance(SETTLED)?;
        }
        talk.finish()
    })
}

#[test]
fn rp_filter_off() {
    isolated(|| with_rp_filter(0));
}

#[test]
fn rp_filter_strict() {
    isolated(|| with_rp_filter(1));
}

#[test]
fn rp_filter_loose() {
    isolated(|| with_rp_filter(2));
}

/// A connection that a rule puts on the bump from its first packet on.
fn by_rule(net: &Net) -> Result<(Eavesdropper, Talk)> {
    net.a
        .ctl(&["rule", "add", "--dport", "7001", "--bump", "scramble"])?;
    let ears = net.eavesdrop()?;
    let talk = net.talk(7001)?;
    talk.advance(SETTLED)?;
    net.wait_bump(7001, "scramble")?;
    Ok((ears, talk))
}

/// Everything that leaves is masqueraded, as on many a router.
fn masquerading(iptables: &str) -> Result<()> {
    Setup::new().run(|net| {
        for node in [&net.a, &net.b] {
            node.host
                .shell(&format!("{iptables} -t nat -A POSTROUTING -j MASQUERADE"))?;
        }
        in_and_out(net, 7000)?;
        // From its first packet on, too.
        let (ears, talk) = by_rule(net)?;
        ears.heard_nothing(&talk.plaintexts, SETTLED as usize)?;
        talk.finish()
    })
}

#[test]
fn everything_is_masqueraded() {
    isolated(|| masquerading("iptables-nft"));
}

#[test]
fn everything_is_masqueraded_by_the_legacy_iptables() {
    isolated(|| masquerading("iptables-legacy"));
}

#[test]
fn a_translated_connection_is_refused_and_the_rule_named() {
    isolated(|| {
        Setup::new().run(|net| {
            let nat = "POSTROUTING -d 10.0.1.2/32 -p tcp -j SNAT --to-source 10.0.1.9";
            let begin = "ip address add 10.0.1.9/24 dev eth0; iptables -t nat -A";
            net.a.host.shell(&format!("{begin} {nat}"))?;
            let talk = net.talk(7000)?;
            talk.advance(256 << 10)?;
            let said = net.a.refused(&["enable", "--dport", "7000"])?;
            ensure!(
                said.contains(nat) && said.contains("exclude 10.0.1.2"),
                "{said}"
            );
            let rule = ["rule", "add", "--dport", "7000", "--bump", "scramble"];
            let said = net.a.refused(&rule)?;
            ensure!(said.contains(nat), "{said}");
            ensure!(net.a.bumps(7000)? == ["plain"]);
            talk.advance(256 << 10)?;
            talk.finish()?;

            // A new one keeps its address on the bump, and the far end knows it by that.
            net.a
                .ctl(&["rule", "add", "--dport", "7001", "--bump", "scramble"])?;
            let ears = net.eavesdrop()?;
            let talk = net.talk(7001)?;
            talk.advance(SETTLED)?;
            let there = net.b.ctl(&["conn", "list"])?.to_string();
            ensure!(there.contains(&format!("\"{}\"", talk.client)), "{there}");
            ears.heard_nothing(&talk.plaintexts, SETTLED as usize)?;
            talk.finish()
        })
    });
}

/// A bridge, a container on it, and the rules of dockerd.
fn docker(host: &Host, iptables: &str) -> Result<()> {
    let rules = [
        "-t filter -P FORWARD DROP",
        "-t filter -N DOCKER-USER",
        "-t filter -N DOCKER-FORWARD",
        "-t filter -A FORWARD -j DOCKER-USER",
        "-t filter -A FORWARD -j DOCKER-FORWARD",
        "-t filter -A DOCKER-USER -j RETURN",
        "-t filter -A DOCKER-FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
        "-t filter -A DOCKER-FORWARD -i docker0 ! -o docker0 -j ACCEPT",
        "-t nat -N DOCKER",
        "-t nat -A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER",
        "-t nat -A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER",
        "-t nat -A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE",
        "-t nat -A DOCKER -i docker0 -j RETURN",
    ];
    let rules: String = rules.map(|rule| format!("{iptables} {rule}\n")).concat();
    host.shell(&format!(
        "ip link add docker0 type bridge; ip address add 172.17.0.1/16 dev docker0
             ip netns add container
             ip link add veth0 type veth peer name eth0 netns container
             ip link set veth0 master docker0 up; ip link set docker0 up
             ip -n container address add 172.17.0.2/16 dev eth0
             ip -n container link set eth0 up
             ip -n container route add default via 172.17.0.1
             sysctl -w net.ipv4.ip_forward=1\n{rules}"
    ))
    .map(drop)
}

fn beside_docker(iptables: &str) -> Result<()> {
    Setup::new().run(|net| {
        docker(&net.a.host, iptables)?;
        in_and_out(net, 7000)?;
        let (ears, talk) = by_rule(net)?;
        // What a container sends is not this host's: it goes its own way, whatever the rules say.
        let listener = net.b.host.in_ns(|| TcpListener::bind(server(7002)))?;
        let mut hello = net.a.host.command("ip");
        hello.args(["netns", "exec", "container", "sh", "-c"]);
        hello.arg("echo hello | socat -t 0 - TCP:10.0.1.2:7002,connect-timeout=10");
        net.a.host.run_within(SOON, hello)?;
        let (_, from) = listener.accept()?;
        ensure!(from.ip() == talk.client.ip(), "it came from {from}");
        ears.heard_nothing(&talk.plaintexts, SETTLED as usize)?;
        talk.finish()
    })
}

#[test]
fn beside_containers() {
    isolated(|| beside_docker("iptables-nft"));
}

#[test]
fn beside_containers_of_the_legacy_iptables() {
    isolated(|| beside_docker("iptables-legacy"));
}

/// A socket bound to a device, and whether it gets a connection within a time.
fn bound(host: &Host, to: SocketAddr, patience: Duration) -> Result<(Socket, bool)> {
    let socket = host.in_ns(|| Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)))?;
    socket.bind_device(Some(b"eth0"))?;
    match socket.connect_timeout(&to.into(), patience) {
        Ok(()) => Ok((socket, true)),
        Err(error) => {
            let closed = [ErrorKind::TimedOut, ErrorKind::WouldBlock];
            let unreachable = [ErrorKind::HostUnreachable, ErrorKind::NetworkUnreachable];
            ensure!(
                closed.contains(&error.kind()) || unreachable.contains(&error.kind()),
                "{error}"
            );
            Ok((socket, false))
        }
    }
}

#[test]
fn a_socket_bound_to_a_device_is_refused_and_never_leaves_in_plain() {
    isolated(|| {
        Setup::new().run(|net| {
            // At this end.
            let _listener = net.b.host.in_ns(|| TcpListener::bind(server(7000)))?;
            let (_near, connected) = bound(&net.a.host, server(7000), HANG)?;
            ensure!(connected, "no rule forbids it yet");
            let ours = net.a.refused(&["enable", "--dport", "7000"])?;
            ensure!(ours.contains("bound to a device"), "{ours}");
            let theirs = net.b.refused(&["enable", "--sport", "7000"])?;
            ensure!(
                theirs.contains("at the peer is bound to a device"),
                "{theirs}"
            );
            for node in [&net.a, &net.b] {
                ensure!(node.bumps(7000)? == ["plain"]);
            }
            // Where a rule wants the bump, it goes nowhere.
            net.a
                .ctl(&["rule", "add", "--dport", "7001", "--bump", "scramble"])?;
            let _listener = net.b.host.in_ns(|| TcpListener::bind(server(7001)))?;
            let ears = net.eavesdrop()?;
            let (_socket, connected) = bound(&net.a.host, server(7001), IN_VAIN)?;
            let heard = ears.finish()?.segments(7001);
            ensure!(
                !connected && heard == [0, 0],
                "connected {connected}, heard {heard:?}"
            );
            Ok(())
        })
    });
}

/// `a` forwards, and its nat table leads what comes for its port 7000 to a third host: what comes by a bump as well, and the
/// answers come back by that.
fn redirecting(variant: &str) -> Result<()> {
    Setup::new().run(|net| {
        let third = net.intruder()?;
        net.a.host.shell(&format!(
            "sysctl -w net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
                 to='-t nat -A PREROUTING -p tcp --dport 7000 -j DNAT --to-destination'
                 iptables-{variant} $to 10.0.3.3; ip6tables-{variant} $to fd00:3::3"
        ))?;
        third.shell("ip route add default via 10.0.3.1; ip route add default via fd00:3::1")?;
        let calls = |to: SocketAddr| {
            net.b.host.in_ns(|| {
                let connected = TcpStream::connect_timeout(&to, HANG);
                connected.is_ok()
            })
        };
        let ends = ["10.0.1.1:7000", "[fd00:1::1]:7000"].map(|end| end.parse());
        let _listener = third.in_ns(|| TcpListener::bind("[::]:7000"))?;
        for end in ends.clone() {
            ensure!(calls(end?), "in plain it goes there");
        }
        let rule = ["rule", "add", "--dport", "7000", "--bump", "scramble"];
        net.b.ctl(&rule)?;
        // The daemon sees when its host begins to forward, and has its rules say so.
        wait("rules for what is led elsewhere", || {
            let rules = net.a.host.run("iptables-save -t mangle");
            rules.is_ok_and(|rules| rules.contains("DIBS-ANSWER"))
        })?;
        let ears = net.eavesdrop()?;
        for end in ends {
            ensure!(calls(end?), "by the bump as well");
        }
        let heard = ears.finish()?.segments(7000);
        ensure!(heard == [0, 0], "in plain between the hosts: {heard:?}");
        Ok(())
    })
}

#[test]
fn what_the_nat_table_leads_elsewhere_goes_there_by_a_bump() {
    isolated(|| redirecting("nft"));
}

#[test]
fn what_the_nat_table_of_the_legacy_iptables_leads_elsewhere_goes_there_by_a_bump() {
    isolated(|| redirecting("legacy"));
}

/// The packets that a rule of `a` counted.
fn counted(net: &Net, rule: &str) -> Result<u64> {
    let listed = net.a.host.run("iptables-save -c -t mangle")?;
    let line = listed.lines().find(|line| line.ends_with(rule));
    let count = line.and_then(|line| line.strip_prefix('[')?.split_once(':')?.0.parse().ok());
    count.with_context(|| format!("no {rule}: {listed}"))
}

#[test]
fn an_icmp_error_goes_with_its_connection() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.talk(7000)?;
            net.a.enable(7000)?;
            net.wait_bump(7000, "scramble")?;
            talk.advance(SETTLED)?;
            let arrives = |device: &str| format!("-A INPUT -i {device} -p icmp -j RETURN");
            for device in ["dibs1", "eth0", "wlan0"] {
                net.a
                    .host
                    .shell(&format!("iptables -t mangle {}", arrives(device)))?;
            }
            let ears = net.eavesdrop()?;
            // The error quotes what it is about, plaintext included.
            let reject = "INPUT -i dibs1 -p tcp --dport 7000 -j REJECT --reject-with \
                          icmp-port-unreachable";
            net.b.host.shell(&format!("iptables -I {reject}"))?;
            wait("an error to arrive by the bump", || {
                counted(net, &arrives("dibs1")).is_ok_and(|count| count > 0)
            })?;
            net.b.host.shell(&format!("iptables -D {reject}"))?;
            for device in ["eth0", "wlan0"] {
                ensure!(counted(net, &arrives(device))? == 0, "plain, by {device}");
            }
            talk.advance(SETTLED)?;
            ears.heard_nothing(&talk.plaintexts, 1 << 20)?;
            talk.finish()
        })
    });
}

#[test]
fn a_connection_that_follows_loses_its_entry() {
    isolated(|| {
        Setup::new()
            .rule("bump = \"scramble\"\ndport = 7000")
            .run(|net| {
                let ears = net.eavesdrop()?;
                let talk = net.talk(7000)?;
                net.wait_bump(7000, "scramble")?;
                talk.advance(SETTLED)?;
                // `b` made no choice, and has no rule for it: it follows what comes.
                for _ in 0..20 {
                    for node in [&net.b, &net.a] {
                        node.host.run("conntrack -F")?;
                        talk.advance(64 << 10)?;
                    }
                }
                net.wait_bump(7000, "scramble")?;
                talk.advance(SETTLED)?;
                ears.heard_nothing(&talk.plaintexts, SETTLED as usize)?;
                talk.finish()
            })
    });
}

/// Of so many events at once the kernel drops some, and the end that has no choice for it is the only one
/// that sends.
#[test]
fn a_connection_that_follows_loses_its_entry_and_nobody_says_so() {
    isolated(|| {
        Setup::new()
            .rule("bump = \"scramble\"\ndport = 7000")
            .run(|net| {
                let ears = net.eavesdrop()?;
                let (mut near, mut far) = connect(&net.a.host, &net.b.host, server(7000))?;
                net.wait_bump(7000, "scramble")?;
                let plaintext = next_plaintext();
                let mut sent = 0;
                let mut answer = |bytes: usize| -> Result<()> {
                    let (mut message, mut received) = (vec![0; bytes], vec![0; bytes]);
                    plaintext.fill(sent, &mut message);
                    sent += bytes as u64;
                    far.write_all(&message)?;
                    near.set_read_timeout(Some(SOON))?;
                    near.read_exact(&mut received).context("an answer")?;
                    ensure!(received == message, "other bytes");
                    Ok(())
                };
                answer(10_000)?;
                // Nothing of it is under way any more.
                net.b.wait_locked(7000)?;
                net.b.suspend()?;
                net.b.host.in_ns(|| -> Result<()> {
                    let socket = UdpSocket::bind("10.0.1.2:0")?;
                    for port in 10_000..40_000 {
                        socket.send_to(&[0], ("10.0.1.1", port))?;
                    }
                    Ok(())
                })?;
                net.b.host.run("conntrack -D -p tcp --orig-port-dst 7000")?;
                net.b.go_on()?;
                answer(50_000)?;
                ears.heard_nothing(&[plaintext], 50_000)
            })
    });
}

/// What a host exempts from conntrack cannot follow by its mark.
#[test]
fn untracked_connections_never_answer_in_plain() {
    isolated(|| {
        Setup::new().run(|net| {
            let exempt = "for chain in PREROUTING OUTPUT; do
                iptables -t raw -A $chain -p tcp -j CT --notrack
                ip6tables -t raw -A $chain -p tcp -j CT --notrack; done";
            net.b.host.shell(exempt)?;
            for port in ["7001", "7002"] {
                net.a
                    .ctl(&["rule", "add", "--dport", port, "--bump", "scramble"])?;
            }
            // Nothing at `b` but the bump that it comes by says where this one belongs.
            let ears = net.eavesdrop()?;
            for to in [server(7001), server_v6(7001)] {
                let _listener = net.b.host.in_ns(|| TcpListener::bind(to))?;
                let before = net.b.counter("plain_dropped")?;
                let connected = net
                    .a
                    .host
                    .in_ns(|| TcpStream::connect_timeout(&to, IN_VAIN));
                ensure!(connected.is_err(), "{to} answered");
                wait(&format!("word of what {to} answered"), || {
                    net.b.counter("plain_dropped").is_ok_and(|now| now > before)
                })?;
            }
            // A rule at `b` does, and so does a choice.
            net.b
                .ctl(&["rule", "add", "--sport", "7002", "--bump", "scramble"])?;
            let ruled = net.talk(7002)?;
            ruled.advance(SETTLED)?;
            let heard = ears.finish()?;
            for port in [7001, 7002] {
                heard.no_segment(port)?;
            }
            let chosen = net.bumped()?;
            let ears = net.eavesdrop()?;
            chosen.advance(SETTLED)?;
            ears.heard_nothing(&chosen.plaintexts, SETTLED as usize)?;
            net.a.disable(7000)?;
            net.wait_bump(7000, "plain")?;
            chosen.advance(64 << 10)?;
            chosen.finish()?;
            ruled.finish()
        })
    });
}
