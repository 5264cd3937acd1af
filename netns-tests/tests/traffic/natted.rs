//! Live connections through routers that translate addresses: moved in both directions, and refused where they cannot be.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use dibs_io::{PacketEar, PacketSender};
use dibs_lab::load::retransmissions;
use dibs_lab::processor::{memory_of, time_of};
use dibs_wire::packet::{self, FlowKey, Packet};
use dibs_wire::readdress;
use netns_tests::daemon::{Node, SOON, wait};
use netns_tests::homes::{Homes, server};
use netns_tests::household::{Households, SERVER};
use netns_tests::routed::exchange;
use netns_tests::traffic::{SETTLED, Talk, connect, connect_translated};
use netns_tests::{isolated, programs};
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::Signal;
use nix::unistd::geteuid;

/// Bytes of an exchange.
const SOME: usize = 200_000;
/// Bytes of many windows.
const MUCH: usize = 300_000_000;
/// Segments that a switch may have sent again, at most.
const FEW_RESENT: u64 = 5;
/// Bytes that fit into every window, so that routers that follow the numbers know the connection still.
const FEW: usize = 2_000;
/// The port that connections come from, on both laptops.
const FROM: u16 = 40_000;

/// Moves the connections of both laptops at once.
fn both(net: &Homes, bump: &str) -> Result<()> {
    let asked = net.laptops.each_ref();
    let moved = thread::scope(|scope| {
        let asking = asked.map(|laptop| scope.spawn(|| laptop.put_on(bump, "--dport", 7000)));
        asking.map(|asking| asking.join().expect("it does not panic"))
    });
    moved.into_iter().collect::<Result<()>>()?;
    let on = net.b.bumps(7000)?;
    ensure!(on == vec![bump; on.len()], "{on:?}");
    Ok(())
}

/// Number of segments that both ends sent again.
fn resent((near, far): &(TcpStream, TcpStream)) -> Result<u64> {
    Ok(retransmissions(near)? + retransmissions(far)?)
}

/// Connections as a user sees them.
fn listed(node: &Node) -> Result<String> {
    node.host.run(&format!(
        "{} conn list",
        programs::built("dibsctl").display()
    ))
}

/// State of plain, of the first laptop's connection.
fn plain(net: &Homes) -> Result<serde_json::Value> {
    Ok(net.laptops[0].ctl(&["conn", "list"])?[0]["plain"].clone())
}

/// Two laptops with the same address and ports have so many connections each in plain; their routers gave each another port or
/// address. One moves to a third network in the midst of a transfer.
fn two_laptops(net: &mut Homes, many: u16) -> Result<()> {
    let each = (0..many).flat_map(|n| [(0, FROM + n), (1, FROM + n)]);
    let conns = each.map(|(laptop, from)| net.connect(laptop, from, 7000));
    let mut conns = conns.collect::<Result<Vec<_>>>()?;
    for conn in &mut conns {
        exchange(conn, FEW)?;
    }
    both(net, "seal")?;
    net.laptops
        .iter()
        .try_for_each(|laptop| laptop.wait_locked(7000))?;
    for conn in &mut conns {
        exchange(conn, FEW)?;
    }
    // The names outlive each daemon.
    net.b.stop(Signal::SIGKILL)?;
    net.b.start()?;
    for conn in &mut conns {
        exchange(conn, FEW)?;
    }
    both(net, "plain")?;
    for conn in &mut conns {
        exchange(conn, FEW)?;
    }
    let roams = conns.swap_remove(0);
    drop(conns);
    let laptop = &net.laptops[0];
    wait("one connection", || {
        laptop.bumps(7000).is_ok_and(|on| on.len() == 1)
    })?;
    laptop.put_on("seal", "--dport", 7000)?;
    let talk = Talk::over(&laptop.host, &net.b.host, roams)?;
    talk.advance(SETTLED)?;
    for moves in [roam, renumber] {
        moves(net)?;
        talk.advance(2 * SETTLED)?;
    }
    let said = laptop.refused(&["disable", "--dport", "7000"])?;
    ensure!(said.contains("does not carry it in plain"), "{said}");
    talk.advance(SETTLED)?;
    talk.finish()?;
    wait("the names are forgotten", || {
        let file = std::fs::read_to_string(net.b.directory().join("dibsd.state"));
        file.is_ok_and(|text| text.contains("\"matched\": []"))
    })
}

#[test]
fn live_connections_move_through_two_translations() {
    isolated(|| Homes::run(|net| two_laptops(net, 25)));
}

/// Both homes are behind one carrier, who gives all of it one address.
#[test]
fn live_connections_of_two_homes_move_through_one_carrier() {
    isolated(|| {
        Homes::run(|net| {
            net.internet
                .run("nft add rule ip cloud from oifname b0 masquerade")?;
            two_laptops(net, 200)
        })
    });
}

/// Two laptops with the same address, of which the server knows the routers. It asks each peer for what comes from there; what is another
/// device's behind the router stays where it is.
#[test]
fn the_server_begins_with_what_routers_translate() {
    isolated(|| {
        Homes::run(|net| {
            let mut conns = (0..40)
                .map(|n| net.connect(n % 2, FROM + n as u16, 7000))
                .collect::<Result<Vec<_>>>()?;
            // A device behind the first laptop's router.
            let listens = SocketAddr::from(([10, 0, 9, 2], 7000));
            let ends = [listens, server(7000)];
            let mut others = connect_translated(geteuid(), 0, &net.homes[0], &net.b.host, ends)?;
            for conn in &mut conns {
                exchange(conn, FEW)?;
            }
            for _ in 0..2 {
                net.b.put_on("seal", "--sport", 7000)?;
                let [a, c] = net.laptops.each_ref().map(|laptop| laptop.bumps(7000));
                let on = [net.b.bumps(7000)?, a?, c?];
                ensure!(on.each_ref().map(Vec::len) == [40, 20, 20], "{on:?}");
                ensure!(on.iter().flatten().all(|on| on == "seal"), "{on:?}");
                for conn in &mut conns {
                    exchange(conn, FEW)?;
                }
                exchange(&mut others, SOME)?;
                net.b.put_on("plain", "--sport", 7000)?;
                for conn in &mut conns {
                    exchange(conn, FEW)?;
                }
            }
            drop(conns);
            wait("the end of all that is the laptops'", || {
                net.b.bumps(7000).is_ok_and(|on| on.is_empty())
            })?;
            let enable = ["enable", "--sport", "7000", "--bump", "seal"];
            let said = net.b.refused(&enable)?;
            ensure!(
                said.contains("1 connection(s) come from the address of a peer's router"),
                "{said}"
            );
            exchange(&mut others, SOME)
        })
    });
}

/// Transfers over two connections of each laptop, in plain.
fn four_talks(net: &Homes) -> Result<Vec<Talk>> {
    let talk = |n: u16| {
        let laptop = usize::from(n % 2);
        let ends = net.connect(laptop, FROM + n, 7000)?;
        Talk::over(&net.laptops[laptop].host, &net.b.host, ends)
    };
    (0..4).map(talk).collect()
}

/// A server that acknowledged in plain what the laptop sent by the bump already would be answered by the laptop's router with a reset.
#[test]
fn busy_connections_go_there_and_back_by_the_server() {
    isolated(|| {
        Homes::run(|net| {
            let talks = four_talks(net)?;
            for round in 0..10 {
                for bump in ["seal", "plain"] {
                    let advance = |talk: &Talk| talk.advance(64 << 10);
                    let moved = net.b.put_on(bump, "--sport", 7000);
                    let moved = moved.and_then(|()| talks.iter().try_for_each(advance));
                    moved.with_context(|| format!("round {round}, to {bump}"))?;
                }
            }
            talks.into_iter().try_for_each(Talk::finish)
        })
    });
}

/// A connection that has just left a bump by a rule is held in plain for some seconds, but not if its peer is asked to go back.
#[test]
fn busy_connections_go_there_and_back_by_a_rule_of_the_server() {
    isolated(|| {
        Homes::run(|net| {
            let talks = four_talks(net)?;
            let advance = || talks.iter().try_for_each(|talk| talk.advance(64 << 10));
            for round in 0..10 {
                let rule = ["rule", "add", "--sport", "7000", "--bump", "seal"];
                let made = net.b.ctl(&rule)?;
                net.b
                    .wait_bump(7000, "seal")
                    .and_then(|()| advance())
                    .with_context(|| format!("round {round}"))?;
                net.b.ctl(&["rule", "del", &made["id"].to_string()])?;
                advance().with_context(|| format!("round {round}, in plain"))?;
            }
            talks.into_iter().try_for_each(Talk::finish)
        })
    });
}

/// A device behind the laptop's router has the laptop's address there. Rules of the server mean the laptop's connections, and
/// nothing else.
#[test]
fn rules_leave_others_behind_a_laptops_router_alone() {
    isolated(|| {
        Homes::run(|net| {
            let rule = ["rule", "add", "--bump", "seal", "--sport"];
            net.b.ctl(&[&rule[..], &["7000"]].concat())?;
            let made = net.b.ctl(&[&rule[..], &["7001", "--require"]].concat())?;
            let said = made["warnings"].to_string();
            ensure!(said.contains("add the rule on a, too"), "{said}");
            let mut own = [net.connect(0, FROM, 7000)?, net.connect(0, FROM, 7001)?];
            let mut others = Vec::new();
            let mut talk = |net: &Homes, from: u16, is_up: bool| -> Result<()> {
                for to in [7000, 7001] {
                    // The router itself is one.
                    let listens = SocketAddr::from(([10, 0, 9, 2], to));
                    let (home, b) = (&net.homes[0], &net.b.host);
                    let new = connect_translated(geteuid(), from, home, b, [listens, server(to)]);
                    others.push(new.context("of another device")?);
                    let new = net.connect(0, from, to);
                    exchange(&mut new.context("of the laptop in plain")?, FEW)?;
                }
                let bumped = own.iter_mut().filter(|_| is_up);
                let conns = bumped.chain(&mut others).enumerate();
                for (index, conn) in conns {
                    exchange(conn, FEW).with_context(|| format!("{index} at {from}"))?;
                }
                Ok(())
            };
            talk(net, 50_000, true)?;
            net.laptops[0].ctl(&["enable", "--sport", "40000", "--bump", "seal"])?;
            talk(net, 50_001, true)?;
            for port in [7000, 7001] {
                net.laptops[0].wait_locked(port)?;
            }
            net.b.stop(Signal::SIGKILL)?;
            talk(net, 50_002, false)?;
            net.b.start()?;
            talk(net, 50_003, true)?;
            roam(net)?;
            talk(net, 50_004, true)?;
            let on = [net.b.bumps(7000)?, net.b.bumps(7001)?];
            ensure!(
                on.iter().all(|on| on.contains(&"seal".to_owned())),
                "{on:?}"
            );
            Ok(())
        })
    });
}

/// The server's rule means the laptops' connections from then on, those in plain and new ones. Another device's stay where they are.
#[test]
fn rules_of_the_server_take_what_routers_translate() {
    isolated(|| {
        Homes::run(|net| {
            let listens = SocketAddr::from(([10, 0, 9, 2], 7000));
            let ends = [listens, server(7000)];
            let mut others = connect_translated(geteuid(), 0, &net.homes[0], &net.b.host, ends)?;
            let mut talks = Vec::new();
            let mut begin = |net: &Homes, from: u16| -> Result<()> {
                for (laptop, own) in net.laptops.iter().enumerate() {
                    let ends = net.connect(laptop, from, 7000)?;
                    talks.push(Talk::over(&own.host, &net.b.host, ends)?);
                }
                Ok(())
            };
            begin(net, FROM)?;
            let rule = ["rule", "add", "--sport", "7000", "--bump", "seal"];
            let made = net.b.ctl(&rule)?;
            begin(net, FROM + 1)?;
            let all_on = |bump: &str| {
                let is_on = |laptop: &Node| {
                    let on = laptop.bumps(7000);
                    on.is_ok_and(|on| on == [bump, bump])
                };
                wait(&format!("each laptop's two connections on {bump}"), || {
                    net.laptops.iter().all(is_on)
                })
            };
            for talk in &talks {
                talk.advance(SETTLED)?;
            }
            all_on("seal")?;
            exchange(&mut others, SOME)?;
            net.b.ctl(&["rule", "del", &made["id"].to_string()])?;
            all_on("plain")?;
            exchange(&mut others, SOME)?;
            talks.into_iter().try_for_each(Talk::finish)
        })
    });
}

/// Data by a name that the server does not know would be answered with a reset, so it is told the name before the rule is in force.
#[test]
fn rules_of_a_laptop_take_transfers_that_its_router_translates() {
    isolated(|| {
        Homes::run(|net| {
            let ends = net.connect(0, FROM, 7000)?;
            let laptop = &net.laptops[0];
            let talk = Talk::over(&laptop.host, &net.b.host, ends)?;
            talk.advance(SETTLED)?;
            let made = laptop.ctl(&["rule", "add", "--dport", "7000", "--bump", "seal"])?;
            talk.advance(SETTLED)?;
            laptop.wait_bump(7000, "seal")?;
            net.b.wait_bump(7000, "seal")?;
            laptop.ctl(&["rule", "del", &made["id"].to_string()])?;
            laptop.wait_bump(7000, "plain")?;
            talk.advance(SETTLED)?;
            talk.finish()
        })
    });
}

/// Connections that say nothing when the laptop looks at them may speak a moment later. If the server has left the bump by then, a router
/// that did not see this answers what the server acknowledges in plain with a reset.
#[test]
fn connections_that_speak_now_and_then_leave_for_plain_unharmed() {
    const MANY: u16 = 100;
    const EACH: Duration = Duration::from_millis(500);
    isolated(|| {
        Homes::run_far(Duration::from_millis(30), |net| {
            let conns = (0..MANY).map(|n| net.connect(0, FROM + n, 7000));
            let conns = conns.collect::<Result<Vec<_>>>()?;
            let stopped = AtomicBool::new(false);
            let speak = |conn: &mut (TcpStream, TcpStream)| -> Result<()> {
                while !stopped.load(Ordering::Relaxed) {
                    exchange(conn, 100)?;
                    thread::sleep(EACH);
                }
                exchange(conn, FEW)
            };
            thread::scope(|scope| {
                let speak = &speak;
                let mut speaking = Vec::new();
                for mut conn in conns {
                    speaking.push(scope.spawn(move || speak(&mut conn)));
                    thread::sleep(EACH / u32::from(MANY));
                }
                let laptop = &net.laptops[0];
                let moved = (0..6).try_for_each(|_| {
                    laptop.put_on("seal", "--dport", 7000)?;
                    laptop.put_on("plain", "--dport", 7000)
                });
                stopped.store(true, Ordering::Relaxed);
                let spoken = speaking.into_iter();
                let spoken = spoken.map(|it| it.join().expect("it does not panic"));
                let ended: Vec<_> = spoken.filter_map(Result::err).collect();
                if let Some(first) = ended.first() {
                    bail!("{} of {MANY} ended, one by: {first:#}", ended.len());
                }
                moved
            })
        })
    });
}

/// Nobody hears the server's answer, who would tell the name by which it knows the connection. The next daemon does not send by it what
/// the server would answer with a reset.
#[test]
fn a_daemon_that_ends_while_it_asks_leaves_the_connection_in_plain() {
    isolated(|| {
        Homes::run(|net| {
            let mut conn = net.connect(0, FROM, 7000)?;
            exchange(&mut conn, SOME)?;
            for signal in [Signal::SIGKILL, Signal::SIGTERM] {
                net.b.suspend()?;
                let laptop = &mut net.laptops[0];
                let enable = ["enable", "--dport", "7000", "--bump", "seal"];
                let asking = laptop.host.spawn(laptop.dibsctl(&enable))?;
                wait("a question", || {
                    laptop
                        .saved()
                        .is_ok_and(|saved| saved.contains("generation"))
                })?;
                laptop.stop(signal)?;
                asking.output(2 * SOON)?;
                laptop.start()?;
                exchange(&mut conn, SOME)?;
                ensure!(laptop.bumps(7000)? == ["plain"]);
                net.b.go_on()?;
                exchange(&mut conn, SOME)?;
                wait("a move to the bump", || {
                    net.laptops[0].put_on("seal", "--dport", 7000).is_ok()
                })?;
                exchange(&mut conn, SOME)?;
                net.laptops[0].wait_locked(7000)?;
                net.laptops[0].put_on("plain", "--dport", 7000)?;
                exchange(&mut conn, FEW)?;
            }
            Ok(())
        })
    });
}

/// The first home has another public address from now on.
fn renumber(net: &Homes) -> Result<()> {
    net.internet.run("ip addr add 198.51.100.9/30 dev a0")?;
    let commands = "ip addr add 198.51.100.10/30 dev wan0\n\
                    ip addr del 198.51.100.2/30 dev wan0\n\
                    ip route replace default via 198.51.100.9\n\
                    conntrack -F";
    net.homes[0].shell(commands).map(drop)
}

/// The first laptop moves to a network with other addresses.
fn roam(net: &Homes) -> Result<()> {
    net.homes[0].shell(
        "ip addr add 172.20.3.1/24 dev lan0\n\
         ip addr del 192.168.1.1/24 dev lan0\n\
         conntrack -D -p tcp",
    )?;
    net.laptops[0].host.shell(
        "ip addr del 192.168.1.10/24 dev lan0\n\
         ip addr add 172.20.3.9/24 dev lan0\n\
         ip route add default via 172.20.3.1",
    )?;
    Ok(())
}

/// The router knows the address that a laptop had, so plain carries the connection just now; once it is there the address goes, because
/// only the bump needed it.
#[test]
fn a_connection_whose_address_is_gone_stays_on_its_bump() {
    isolated(|| {
        Homes::run(|net| {
            let mut conn = net.connect(0, FROM, 7000)?;
            let laptop = &net.laptops[0];
            laptop.put_on("seal", "--dport", 7000)?;
            exchange(&mut conn, FEW)?;
            laptop.host.shell(
                "ip addr del 192.168.1.10/24 dev lan0\n\
                 ip addr add 192.168.1.88/24 dev lan0\n\
                 ip route add default via 192.168.1.1",
            )?;
            exchange(&mut conn, SOME)?;
            let said = laptop.refused(&["disable", "--dport", "7000"])?;
            ensure!(said.contains("has its address no more"), "{said}");
            let said = net.b.refused(&["disable", "--sport", "7000"])?;
            ensure!(said.contains("does not carry it in plain"), "{said}");
            exchange(&mut conn, SOME)?;
            ensure!(laptop.bumps(7000)? == ["seal"]);
            Ok(())
        })
    });
}

/// A proxy at the router ends the laptop's connection, and makes one of its own to the server.
#[test]
fn a_connection_through_a_proxy_is_refused_and_unharmed() {
    isolated(|| {
        Homes::run(|net| {
            let home = net.homes[0].clone();
            home.shell(
                "nft 'add chain ip nat pre { type nat hook prerouting priority -100; }'\n\
                 nft add rule ip nat pre iifname lan0 tcp dport 7000 redirect to :9999",
            )?;
            let proxy = home.in_ns(|| TcpListener::bind(("0.0.0.0", 9999)))?;
            let relay = thread::spawn(move || -> Result<()> {
                let (near, _) = proxy.accept()?;
                let far = home.in_ns(|| TcpStream::connect(server(7000)))?;
                let (mut to, mut from) = (far.try_clone()?, near.try_clone()?);
                let up = thread::spawn(move || io::copy(&mut from, &mut to));
                io::copy(&mut &far, &mut &near).context("down")?;
                up.join()
                    .expect("it does not panic")
                    .context("up")
                    .map(drop)
            });
            let mut conn = net.connect(0, FROM, 7000)?;
            exchange(&mut conn, SOME)?;
            let laptop = &net.laptops[0];
            let said = laptop.refused(&["enable", "--dport", "7000", "--bump", "seal"])?;
            ensure!(
                said.contains("do not arrive there as they were sent"),
                "{said}"
            );
            let add = ["rule", "add", "--dport", "7000", "--bump", "seal"];
            let made = laptop.ctl(&add)?;
            let said = made["warnings"][0].as_str().unwrap_or_default();
            ensure!(
                said.contains("stays in plain")
                    && said.contains("do not arrive there as they were sent"),
                "{made}"
            );
            ensure!(laptop.bumps(7000)? == ["plain"]);
            exchange(&mut conn, SOME)?;
            drop(conn);
            relay.join().expect("it does not panic")
        })
    });
}

/// Somebody on the way copies what the laptop shows, under the address of a connection of their own to the same service.
#[test]
fn who_copies_what_a_laptop_shows_gets_no_match() {
    isolated(|| {
        Homes::run(|net| {
            let (mut own, mut others) = (net.connect(0, FROM, 7000)?, net.connect(1, FROM, 7000)?);
            exchange(&mut own, SOME)?;
            exchange(&mut others, SOME)?;
            net.internet.shell(
                "nft add table ip free\n\
                 nft 'add chain ip free out { type filter hook output priority -300; }'\n\
                 nft add rule ip free out ip daddr 10.0.9.2 tcp dport 7000 notrack",
            )?;
            let (victim, server) = (
                IpAddr::from([198, 51, 100, 2]),
                IpAddr::from([203, 0, 113, 7]),
            );
            let (copier, target) = (IpAddr::from([198, 51, 100, 6]), IpAddr::from([10, 0, 9, 2]));
            let (ear, sender) = net.internet.in_ns(|| {
                let ear = PacketEar::open(true, &[victim], &[(FROM, 7000)]);
                (ear, PacketSender::open(true, 0))
            });
            let (ear, sender) = (ear?, sender?);
            let done = AtomicBool::new(false);
            let server_pid = net.b.pid().context("the server's daemon")?;
            let before = (time_of(server_pid)?, memory_of(server_pid)?);
            let copies = thread::scope(|scope| {
                let copying = scope.spawn(|| {
                    let mut copies = Vec::new();
                    while !done.load(Ordering::Relaxed) {
                        let mut ready = [PollFd::new(ear.as_fd(), PollFlags::POLLIN)];
                        poll(&mut ready, 20u8)?;
                        while let Ok((mut packet, _)) = ear.hear() {
                            let Ok(Packet::Tcp(segment)) = packet::parse(&packet) else {
                                continue;
                            };
                            ensure!(segment.tuple.dst == server);
                            let at = segment.tcp_at();
                            for from in [victim, copier] {
                                let ends = FlowKey::tcp((from, FROM), (target, 7000));
                                readdress::segment(&mut packet, at, &ends);
                                copies.push((from, packet.clone()));
                            }
                            for _ in 0..1000 {
                                sender.send(copier, target, &packet)?;
                            }
                        }
                    }
                    Ok::<_, anyhow::Error>(copies)
                });
                let moved = net.laptops[0].ctl(&["enable", "--dport", "7000", "--bump", "seal"]);
                done.store(true, Ordering::Relaxed);
                moved?;
                copying.join().expect("it does not panic")
            })?;
            ensure!(!copies.is_empty(), "no copies");
            // And once more, when nobody waits for them.
            for (from, packet) in copies.iter().cycle().take(5000) {
                sender.send(*from, target, packet)?;
            }
            let used = time_of(server_pid)?.saturating_sub(before.0);
            let kept = memory_of(server_pid)?.saturating_sub(before.1);
            ensure!(
                used < Duration::from_secs(1) && kept < 4 << 20,
                "{used:?} of a processor, {kept} bytes"
            );
            exchange(&mut own, FEW)?;
            exchange(&mut others, FEW)?;
            ensure!(net.laptops[0].bumps(7000)? == ["seal"] && net.b.bumps(7000)? == ["seal"]);
            let file = std::fs::read_to_string(net.b.directory().join("dibsd.state"))?;
            ensure!(!file.contains("198.51.100.6:40000"), "{file}");
            ensure!(net.b.counter("match_copies_unfit")? >= 1);
            // Not shown to routers, it has no way back once much went by the bump.
            ensure!(plain(net)?["open"] == true);
            let [laptop, _] = &mut net.laptops;
            for node in [laptop, &mut net.b] {
                node.stop(Signal::SIGTERM)?;
                let file = node.directory().join("dibsd.toml");
                let off = "[daemon]\nkeep_plain_open = false\n";
                let text = std::fs::read_to_string(file)?.replacen("[daemon]\n", off, 1);
                node.configure(&text)?;
                node.start()?;
            }
            for _ in 0..MUCH / 10 / SOME {
                exchange(&mut own, SOME)?;
            }
            ensure!(plain(net)?.is_null());
            let said = net.laptops[0].refused(&["disable", "--dport", "7000"])?;
            ensure!(said.contains("does not carry it in plain"), "{said}");
            exchange(&mut own, SOME)
        })
    });
}

/// The router at home forgets its entry while the connection is on the bump, and takes no connection that it did not see begin.
#[test]
fn what_a_router_has_forgotten_stays_on_its_bump() {
    isolated(|| {
        Homes::run(|net| {
            let mut conn = net.connect(0, FROM, 7000)?;
            exchange(&mut conn, SOME)?;
            let (laptop, home) = (&net.laptops[0], &net.homes[0]);
            laptop.ctl(&["enable", "--dport", "7000", "--bump", "seal"])?;
            exchange(&mut conn, SOME)?;
            home.sysctl("net/netfilter/nf_conntrack_tcp_loose", "0")?;
            home.run("conntrack -D -p tcp")?;
            for (node, end) in [(laptop, "--dport"), (&net.b, "--sport")] {
                let said = node.refused(&["disable", end, "7000"])?;
                ensure!(
                    said.contains("the network does not carry it in plain"),
                    "{said}"
                );
                exchange(&mut conn, SOME)?;
            }
            ensure!(laptop.bumps(7000)? == ["seal"] && net.b.bumps(7000)? == ["seal"]);
            wait("plain to be closed", || {
                plain(net).is_ok_and(|plain| plain["open"] == false)
            })?;
            let [here, there] = [listed(laptop)?, listed(&net.b)?];
            ensure!(here.contains("plain closed for"), "{here}");
            let names = ["(there 203.0.113.7:7000)", "(there 192.168.1.10:40000)"];
            ensure!(names.iter().all(|name| there.contains(name)), "{there}");
            Ok(())
        })
    });
}

/// The home's router forgets what is idle for 30 s, and takes no connection that it did not see begin. The connection on the bump
/// is idle for longer.
fn stays_in_mind(idle: Duration) -> Result<()> {
    Homes::run(|net| {
        let home = &net.homes[0];
        home.sysctl("net/netfilter/nf_conntrack_tcp_timeout_established", "30")?;
        home.sysctl("net/netfilter/nf_conntrack_tcp_loose", "0")?;
        let mut conn = net.connect(0, FROM, 7000)?;
        exchange(&mut conn, SOME)?;
        let laptop = &net.laptops[0];
        laptop.put_on("seal", "--dport", 7000)?;
        exchange(&mut conn, SOME)?;
        thread::sleep(idle);
        laptop.put_on("plain", "--dport", 7000)?;
        exchange(&mut conn, SOME)
    })
}

#[test]
fn what_a_router_would_forget_is_kept_in_its_mind() {
    isolated(|| stays_in_mind(Duration::from_secs(35)));
}

#[test]
#[ignore = "takes five minutes"]
fn what_a_router_would_forget_is_kept_in_its_mind_for_minutes() {
    isolated(|| stays_in_mind(Duration::from_secs(300)));
}

/// Far more than a window goes by the bump, which routers that drop what they take for invalid do not see.
#[test]
fn the_way_back_stays_open_through_routers_that_follow_the_numbers() {
    isolated(|| {
        Homes::run(|net| {
            for router in net.homes.iter().chain([&net.internet]) {
                router.shell(
                    "nft add table ip strict\n\
                     nft 'add chain ip strict forward { type filter hook forward priority -10; }'\n\
                     nft add counter ip strict plain\n\
                     nft add rule ip strict forward ct state invalid drop\n\
                     nft add rule ip strict forward tcp sport 7000 counter name plain\n\
                     nft add rule ip strict forward tcp dport 7000 counter name plain",
                )?;
            }
            let mut conn = net.connect(0, FROM, 7000)?;
            exchange(&mut conn, SOME)?;
            let laptop = &net.laptops[0];
            for round in [&net.b, laptop] {
                laptop.ctl(&["enable", "--dport", "7000", "--bump", "seal"])?;
                laptop.wait_locked(7000)?;
                net.internet.run("nft reset counter ip strict plain")?;
                for _ in 0..MUCH / SOME {
                    exchange(&mut conn, SOME)?;
                }
                let seen = net.internet.run("nft -j list counter ip strict plain")?;
                let seen: serde_json::Value = serde_json::from_str(&seen)?;
                let bytes = seen["nftables"][1]["counter"]["bytes"].as_u64();
                let bytes = bytes.with_context(|| format!("{seen}"))?;
                ensure!(bytes < MUCH as u64 / 1000, "{bytes} bytes in plain");
                let end = if std::ptr::eq(round, laptop) {
                    "--dport"
                } else {
                    "--sport"
                };
                let before = resent(&conn)?;
                round.ctl(&["disable", end, "7000"])?;
                ensure!(laptop.bumps(7000)? == ["plain"] && net.b.bumps(7000)? == ["plain"]);
                exchange(&mut conn, SOME)?;
                let resent = resent(&conn)? - before;
                ensure!(resent <= FEW_RESENT, "{resent} segments sent again");
            }
            Ok(())
        })
    });
}

/// A router gives the laptop another IPv6 prefix, and keeps nothing of its connections in mind (NPTv6, RFC 6296).
#[test]
fn a_connection_moves_though_its_prefix_is_translated() {
    isolated(|| {
        Households::run(1, |net| {
            net.internet
                .run("ip -6 route add 2001:db8:101::/64 via 2001:db8:100::2")?;
            net.homes[0].uplinks[0].shell(
                "ip6tables -t mangle -A POSTROUTING -o wan0 -s 2001:db8:1::/64 \
                 -j SNPT --src-pfx 2001:db8:1::/64 --dst-pfx 2001:db8:101::/64\n\
                 ip6tables -t mangle -A PREROUTING -i wan0 -d 2001:db8:101::/64 \
                 -j DNPT --src-pfx 2001:db8:101::/64 --dst-pfx 2001:db8:1::/64",
            )?;
            name_server_v6(net)?;
            let (a, b) = (&net.homes[0].node, &net.b);
            let mut conn = connect(&a.host, &b.host, SocketAddr::from((SERVER[1], 7000)))?;
            let (prefix, seen) = ([0x2001, 0xdb8, 0x101, 0], conn.1.peer_addr()?.ip());
            ensure!(
                matches!(seen, IpAddr::V6(seen) if seen.segments()[..4] == prefix),
                "{seen}"
            );
            for (bump, asks, end) in [
                ("seal", a, "--dport"),
                ("scramble", b, "--sport"),
                ("plain", b, "--sport"),
                ("scramble", a, "--dport"),
                ("plain", a, "--dport"),
            ] {
                exchange(&mut conn, SOME)?;
                asks.put_on(bump, end, 7000)?;
                [a, b]
                    .into_iter()
                    .try_for_each(|node| node.wait_bump(7000, bump))?;
                exchange(&mut conn, SOME)?;
            }
            Ok(())
        })
    });
}

/// `internet` stands for a translator from IPv6 to IPv4 (NAT64).
#[test]
fn a_connection_through_nat64_is_refused_with_that_reason() {
    isolated(|| {
        Households::run(1, |net| {
            let end = SocketAddr::from(([0x64, 0xff9b, 0, 0, 0, 0, 0xcb00, 0x7107], 7000));
            net.internet
                .run(&format!("ip address add {}/128 dev lo nodad", end.ip()))?;
            let a = &net.homes[0].node;
            let mut conn = connect(&a.host, &net.internet, end)?;
            let said = a.refused(&["enable", "--dport", "7000", "--bump", "seal"])?;
            ensure!(said.contains("through NAT64"), "{said}");
            exchange(&mut conn, SOME)
        })
    });
}

/// Names the server's IPv6 address as one of its own at the first household.
fn name_server_v6(net: &mut Households) -> Result<()> {
    let node = &mut net.homes[0].node;
    node.stop(Signal::SIGTERM)?;
    let config = std::fs::read_to_string(node.directory().join("dibsd.toml"))?;
    node.configure(&config.replace("[\"203.0.113.7/32", "[\"2001:db8:7::7\", \"203.0.113.7/32"))?;
    node.start()?;
    node.wait_until_joined(2)
}

/// A home router, and a carrier's behind it, and one that translates IPv6: a live transfer takes each bump and returns to plain, as either end asks in turn. The
/// server has two uplinks, because a single one would show all shares.
#[test]
fn a_transfer_takes_each_bump_through_two_translations() {
    isolated(|| {
        Households::run(1, |net| {
            net.internet.shell(
                "ip address add 203.0.114.1/24 dev b0\n\
                 nft add table ip carrier\n\
                 nft 'add chain ip carrier post { type nat hook postrouting priority 100; }'\n\
                 nft add rule ip carrier post oifname b0 masquerade",
            )?;
            net.b.host.sysctl("net/ipv4/conf/all/arp_ignore", "1")?;
            net.b.host.shell(
                "ip link add link wan0 name wan1 type macvlan mode bridge\n\
                 ip address add 203.0.114.7/24 dev wan1\n\
                 ip link set wan1 up\n\
                 ip route add default via 203.0.114.1 metric 200",
            )?;
            let a = &mut net.homes[0].node;
            let other = "[[path]]\nname = \"other\"\ninterface = \"wan1\"\ntrust = \"untrusted\"\n[[peer]]\n";
            for (node, from, to) in [
                (&mut net.b, "[[peer]]\n", other),
                (a, "lte = \"203.0.113.7", "lte = \"203.0.114.7"),
            ] {
                node.stop(Signal::SIGTERM)?;
                let config = std::fs::read_to_string(node.directory().join("dibsd.toml"))?;
                let config =
                    config.replace("[\"203.0.113.7/32", "[\"2001:db8:7::7\", \"203.0.113.7/32");
                node.configure(&config.replace(from, to))?;
                node.start()?;
            }
            net.homes[0].node.wait_until_joined(2)?;
            let (a, b) = (&net.homes[0].node, &net.b);
            let to = SocketAddr::from(([203, 0, 113, 7], 7000));
            let conn = connect(&a.host, &b.host, to)?;
            ensure!(conn.1.peer_addr()?.ip() == IpAddr::from([203, 0, 113, 1]));
            let talk = Talk::over(&a.host, &b.host, conn)?;
            talk.advance(SETTLED)?;
            net.homes[0].uplinks[0].shell(
                "nft add table ip6 nat\n\
                 nft 'add chain ip6 nat post { type nat hook postrouting priority 100; }'\n\
                 nft add rule ip6 nat post oifname wan0 masquerade",
            )?;
            let mut v6 = connect(&a.host, &b.host, SocketAddr::from((SERVER[1], 7006)))?;
            ensure!(v6.1.peer_addr()?.ip() != v6.0.local_addr()?.ip());
            a.put_on("seal", "--dport", 7006)?;
            a.wait_locked(7006)?;
            exchange(&mut v6, SOME)?;
            talk.strain()?;
            let mut strains = Vec::new();
            for (bump, asks, end) in [
                ("seal", a, "--dport"),
                ("scramble", b, "--sport"),
                ("share", a, "--dport"),
                ("plain", b, "--sport"),
                ("seal", a, "--dport"),
                ("plain", a, "--dport"),
            ] {
                asks.put_on(bump, end, 7000)?;
                [a, b]
                    .into_iter()
                    .try_for_each(|node| node.wait_bump(7000, bump))?;
                talk.advance(2 * SETTLED)?;
                strains.push(talk.strain()?);
            }
            // A busy machine adds to both.
            let is_modest = |(resent, pause): &&(u64, Duration)| {
                *resent <= FEW_RESENT && *pause <= Duration::from_millis(300)
            };
            let modest = strains.iter().filter(is_modest).count();
            let most = 2 * modest > strains.len();
            ensure!(most, "segments sent again, pauses: {strains:?}");
            b.put_on("plain", "--sport", 7006)?;
            exchange(&mut v6, SOME)?;
            talk.finish()
        })
    });
}
