//! Services in containers of the server, which its nat table leads to: on bumps as others are.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};

use anyhow::{Result, bail, ensure};
use dibs_netns::Host;
use netns_tests::daemon::{Node, SOON, wait};
use netns_tests::docker::{self, PORT};
use netns_tests::homes::{self, Homes};
use netns_tests::topology::server;
use netns_tests::traffic::{SETTLED, Talk, connect_translated};
use netns_tests::{Net, Setup, isolated};
use nix::sys::signal::Signal;
use nix::unistd::geteuid;
use socket2::{Domain, Socket, Type};

/// Port that connections of both laptops come from.
const FROM: u16 = 40_000;

/// Docker's proxy listens on the port beside its rules, and what it took would not come to the container.
fn proxy() -> Result<TcpListener> {
    Ok(TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT))?)
}

/// Has the service refuse a call.
fn is_refused(host: &Host, service: SocketAddr) -> Result<()> {
    let called = host.in_ns(|| TcpStream::connect_timeout(&service, SOON));
    match called {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(()),
        other => bail!("{other:?}"),
    }
}

/// Waits until both hosts say that this port of `b` refuses what `a` calls by seal.
fn tell_refusing(a: &Node, b: &Node, port: &str) -> Result<()> {
    for (node, says) in [
        (a, "refuses connections to its port"),
        (b, "this host refuses"),
    ] {
        wait("the port to be told", || {
            let told = node.diagnosis("daemon").unwrap_or_default();
            [says, &format!("port {port} on seal"), "rule add --sport"]
                .iter()
                .all(|part| told.contains(part))
        })?;
    }
    Ok(())
}

/// A connection to the container, on which both talk without end.
fn talk(net: &Net, container: &Host) -> Result<Talk> {
    let ends = docker::connect(&net.a.host, container)?;
    Talk::over(&net.a.host, container, ends)
}

#[test]
fn rules_of_either_end_take_what_begins_to_a_container() {
    isolated(|| {
        Setup::new().run(|net| {
            let container = net.container()?;
            let _proxy = net.b.host.in_ns(proxy)?;
            for option in ["--sport", "--dport"] {
                let node = if option == "--dport" { &net.a } else { &net.b };
                let made = node.ctl(&["rule", "add", option, "8080", "--bump", "seal"])?;
                let ears = net.eavesdrop()?;
                let talk = talk(net, &container)?;
                talk.advance(SETTLED)?;
                net.wait_bump(PORT, "seal")?;
                net.wait_locked(PORT)?;
                net.b.host.run("iptables -t mangle -F")?;
                talk.advance(SETTLED)?;
                // What the container sends then leaves for nowhere, until the nat table leads something there again.
                net.b.host.run("conntrack -F")?;
                talk.advance(SETTLED)?;
                talk.finish_unheard(ears, SETTLED as usize)?;
                if option == "--sport" {
                    node.ctl(&["rule", "del", &made["id"].to_string()])?;
                }
            }
            net.b.host.run("iptables -I DOCKER-USER -i dibs+ -j DROP")?;
            let calling = net.a.host.in_ns(|| -> Result<Socket> {
                let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
                socket.set_nonblocking(true)?;
                let _ = socket.connect(&server(PORT).into());
                Ok(socket)
            })?;
            wait("the port to be told", || {
                let told = net.b.diagnosis("firewall").unwrap_or_default();
                ["port 8080", "172.17.0.2:80", "DOCKER-USER -i dibs+ -j DROP"]
                    .iter()
                    .all(|part| told.contains(part))
            })?;
            drop(calling);
            Ok(())
        })
    });
}

#[test]
fn a_live_connection_to_a_container_moves_and_docker_restarts_meanwhile() {
    isolated(|| {
        Setup::new().run(|net| {
            let container = net.container()?;
            let _proxy = net.b.host.in_ns(proxy)?;
            let talk = talk(net, &container)?;
            talk.advance(SETTLED)?;
            for (number, option) in ["--dport", "--sport"].into_iter().enumerate() {
                let node = [&net.a, &net.b][number];
                node.ctl(&["enable", option, "8080", "--bump", "seal"])?;
                net.wait_bump(PORT, "seal")?;
                talk.advance(SETTLED)?;
                net.wait_locked(PORT)?;
                let ears = net.eavesdrop()?;
                docker::restart(&net.b.host)?;
                talk.advance(SETTLED)?;
                net.b.stop(Signal::SIGKILL)?;
                net.b.start()?;
                talk.advance(SETTLED)?;
                ears.heard_nothing(&talk.plaintexts, SETTLED as usize)?;
                let node = [&net.a, &net.b][number];
                node.ctl(&["disable", option, "8080"])?;
                net.wait_bump(PORT, "plain")?;
                talk.advance(SETTLED)?;
            }
            talk.finish()
        })
    });
}

/// The server knows the laptop by its router, and the container by its nat table: either end finds the connection.
#[test]
fn live_connections_through_routers_to_a_container_move_by_either_end() {
    isolated(|| {
        Homes::run(|net| {
            let container = net.container()?;
            let mut talks = Vec::new();
            for laptop in &net.laptops {
                let ends = [SocketAddr::from(([172, 17, 0, 2], 80)), homes::server(PORT)];
                let conn = connect_translated(geteuid(), FROM, &laptop.host, &container, ends)?;
                talks.push(Talk::over(&laptop.host, &container, conn)?);
            }
            let advance = || talks.iter().try_for_each(|talk| talk.advance(SETTLED));
            advance()?;
            for by_server in [false, true, true] {
                for bump in ["seal", "plain"] {
                    match by_server {
                        true => net.b.put_on(bump, "--sport", PORT)?,
                        false => { net.laptops.iter() }
                            .try_for_each(|laptop| laptop.put_on(bump, "--dport", PORT))?,
                    }
                    let on = net.b.bumps(PORT)?;
                    ensure!(on == [bump; 2], "{on:?}");
                    advance()?;
                    if bump == "seal" {
                        net.b.stop(Signal::SIGKILL)?;
                        net.b.start()?;
                        advance()?;
                        net.b.wait_until_joined(2)?;
                    }
                }
            }
            talks.into_iter().try_for_each(Talk::finish)
        })
    });
}

/// A nat rule that does not mean what comes by a bump leads nothing to the container that begins there. What has begun in plain it does.
#[test]
fn a_nat_rule_for_an_interface_needs_a_rule_of_the_server() {
    isolated(|| {
        Setup::new().run(|net| {
            let container = net.container()?;
            let leads = "-p tcp -m tcp --dport 8080 -j DNAT --to-destination 172.17.0.2:80";
            net.b.host.shell(&format!(
                "iptables -t nat -F DOCKER\niptables -t nat -A DOCKER -i eth0 {leads}"
            ))?;
            let made = net
                .a
                .ctl(&["rule", "add", "--dport", "8080", "--bump", "seal"])?;
            is_refused(&net.a.host, server(PORT))?;
            tell_refusing(&net.a, &net.b, "8080")?;
            net.a.ctl(&["rule", "del", &made["id"].to_string()])?;
            net.b
                .ctl(&["rule", "add", "--sport", "8080", "--bump", "seal"])?;
            let talk = talk(net, &container)?;
            net.wait_bump(PORT, "seal")?;
            talk.advance(SETTLED)?;
            talk.finish()
        })
    });
}

/// A router before the server leads another port of its own to the service.
#[test]
fn connections_to_a_port_that_a_router_leads_to_another_one_move() {
    isolated(|| {
        Homes::run(|net| {
            let to = "ip daddr 203.0.113.7 tcp dport 8443 dnat to 10.0.9.2:443";
            net.internet
                .run(&format!("nft insert rule ip cloud to {to}"))?;
            let host = &net.laptops[0].host;
            let ends = [SocketAddr::from(([10, 0, 9, 2], 443)), homes::server(8443)];
            let talk = |from: u16| -> Result<Talk> {
                let conn = connect_translated(geteuid(), from, host, &net.b.host, ends)?;
                Talk::over(host, &net.b.host, conn)
            };
            let live = talk(FROM)?;
            live.advance(SETTLED)?;
            for by_server in [false, true] {
                for bump in ["seal", "plain"] {
                    match by_server {
                        true => net.b.put_on(bump, "--sport", 443)?,
                        false => net.laptops[0].put_on(bump, "--dport", 8443)?,
                    }
                    let on = [net.b.bumps(443)?, net.laptops[0].bumps(8443)?];
                    ensure!(on == [[bump], [bump]], "{on:?}");
                    live.advance(SETTLED)?;
                }
            }
            live.finish()?;
            // The server's rule knows the port that the service has.
            let rule = net
                .b
                .ctl(&["rule", "add", "--sport", "443", "--bump", "seal"])?;
            let new = talk(FROM + 1)?;
            for bump in ["seal", "plain"] {
                net.b.wait_bump(443, bump)?;
                net.laptops[0].wait_bump(8443, bump)?;
                new.advance(SETTLED)?;
                if bump == "seal" {
                    net.b.ctl(&["rule", "del", &rule["id"].to_string()])?;
                }
            }
            new.finish()?;
            let laptop = &net.laptops[0];
            laptop.ctl(&["rule", "add", "--dport", "8443", "--bump", "seal"])?;
            is_refused(&laptop.host, homes::server(8443))?;
            tell_refusing(laptop, &net.b, "8443")
        })
    });
}

/// A nat rule of the server leads a port to another one of its own: it knows an open connection by that one, and the laptop by the
/// other, and both are refused. What begins on a bump is on it at both ends.
#[test]
fn connections_to_a_port_that_the_server_redirects_begin_on_bumps() {
    isolated(|| {
        Setup::new().run(|net| {
            net.b.host.run(
                "iptables -t nat -A PREROUTING -p tcp --dport 8443 -j REDIRECT --to-ports 443",
            )?;
            let talk = |from: u16| -> Result<Talk> {
                let ends = [server(443), server(8443)];
                let conn = connect_translated(geteuid(), from, &net.a.host, &net.b.host, ends)?;
                Talk::over(&net.a.host, &net.b.host, conn)
            };
            let live = talk(FROM)?;
            live.advance(SETTLED)?;
            let ends = [(&net.a, "--dport", "8443"), (&net.b, "--sport", "443")];
            for ((node, end, port), says) in
                ends.iter().zip(["REDIRECT", "a rule of the nat table"])
            {
                let said = node.refused(&["enable", end, port, "--bump", "seal"])?;
                ensure!(said.contains(says), "{said}");
                live.advance(SETTLED)?;
            }
            live.finish()?;
            for ((node, end, port), from) in ends.iter().zip(FROM + 1..) {
                let made = node.ctl(&["rule", "add", end, port, "--bump", "seal"])?;
                let new = talk(from)?;
                new.advance(SETTLED)?;
                net.a.wait_bump(8443, "seal")?;
                net.b.wait_bump(443, "seal")?;
                for (node, end, port) in ends {
                    let said = node.refused(&["disable", end, port])?;
                    ensure!(said.contains("--force moves it"), "{said}");
                    new.advance(SETTLED)?;
                }
                new.finish()?;
                node.ctl(&["rule", "del", &made["id"].to_string()])?;
            }
            Ok(())
        })
    });
}
