//! Hundreds of connections at once.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result, ensure};
use dibs_netns::{Host, Process};
use netns_tests::daemon::{SOON, wait};
use netns_tests::topology::server;
use netns_tests::{Net, Node, Setup, isolated, isolated_alone, programs};
use nix::sys::signal::Signal;
use nix::sys::socket::{setsockopt, sockopt};

const MANY: usize = 400;
/// More than sockets hold by the kernel's own limit.
const EVENTS: usize = 2000;
/// Connections that are moved at once.
const ROUND: usize = 240;

/// The ports of the near ends of the connections that this host's kernel tracks: on a bump, and plain.
fn sorted(node: &Node) -> Result<(BTreeSet<u16>, BTreeSet<u16>)> {
    let listed = node.host.run("conntrack -L -p tcp")?;
    let (mut bumped, mut plain) = (BTreeSet::new(), BTreeSet::new());
    for line in listed.lines() {
        let word = |name| line.split(' ').find_map(|word| word.strip_prefix(name));
        let port = |name| word(name).and_then(|port: &str| port.parse().ok());
        // Either end may have begun it, as far as the kernel knows.
        let port = match (port("sport="), port("dport=")) {
            (Some(7000), near) | (near, Some(7000)) => near,
            _ => None,
        };
        let mark = word("mark=").and_then(|mark: &str| mark.parse::<u32>().ok());
        if let (Some(port), Some(mark)) = (port, mark) {
            match mark & 0x0f00_0000 {
                0 => plain.insert(port),
                _ => bumped.insert(port),
            };
        }
    }
    Ok((bumped, plain))
}

/// Both ends of all connections, which answer each other until they are stopped.
struct Talks {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Result<usize>>,
}

impl Talks {
    fn start(net: &Net) -> Result<Self> {
        Self::between(&net.a.host, &net.b.host, MANY)
    }

    fn between(from: &Host, to: &Host, many: usize) -> Result<Self> {
        let listener = to.in_ns(|| TcpListener::bind(server(7000)))?;
        let mut ends = Vec::new();
        for _ in 0..many {
            let near = from.in_ns(|| TcpStream::connect(server(7000)))?;
            let (far, _) = listener.accept()?;
            far.set_read_timeout(Some(SOON))?;
            near.set_read_timeout(Some(SOON))?;
            ends.push((near, far));
        }
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut rounds = 0;
            while !stopped.load(Ordering::Relaxed) {
                for (index, (near, far)) in ends.iter_mut().enumerate() {
                    near.write_all(&said(rounds, index))?;
                    far.write_all(&said(index, rounds))?;
                }
                for (index, (near, far)) in ends.iter_mut().enumerate() {
                    let mut heard = [0; 16];
                    far.read_exact(&mut heard)?;
                    ensure!(heard == said(rounds, index));
                    near.read_exact(&mut heard)?;
                    ensure!(heard == said(index, rounds));
                }
                rounds += 1;
            }
            Ok(rounds)
        });
        Ok(Self { stop, thread })
    }

    /// That nothing was lost or changed, and something was said.
    fn end(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let rounds = self.thread.join().expect("it does not panic")?;
        ensure!(rounds > 0, "nothing was said");
        Ok(())
    }
}

fn said(one: usize, other: usize) -> [u8; 16] {
    (one as u128 * 1_000_003 + other as u128).to_be_bytes()
}

/// Begins to change all connections.
fn begin(node: &Node, change: &str) -> Result<Process> {
    let mut command = node.host.command(programs::built("dibsctl"));
    command.args([change, "--all"]);
    node.host.spawn(command)
}

/// Waits until both hosts have the same connections on a bump; how many those are.
fn wait_together(net: &Net) -> Result<usize> {
    let mut count = 0;
    wait("both ends of each connection to be together", || {
        let (Ok((a, _)), Ok((b, _))) = (sorted(&net.a), sorted(&net.b)) else {
            return false;
        };
        count = a.len();
        a == b
    })?;
    Ok(count)
}

/// The ends of a connection part for as long as its own switch takes, not for that of all others.
#[test]
fn many_connections_move_together() {
    isolated(|| {
        Setup::new().run(|net| {
            let talks = Talks::start(net)?;
            for (change, on_bump) in [("enable", MANY), ("disable", 0), ("enable", MANY)] {
                let mut change = begin(&net.a, change)?;
                let mut apart = 0;
                while change.is_running() {
                    // What has come to be plain stays so while it is watched, and the other way round: so
                    // those that were first seen at one end and then not yet at the other are apart at once.
                    for (one, other) in [(&net.a, &net.b), (&net.b, &net.a)] {
                        let ((bumped, plain), then) = (sorted(one)?, sorted(other)?);
                        let behind = match on_bump {
                            0 => plain.intersection(&then.0).count(),
                            _ => bumped.intersection(&then.1).count(),
                        };
                        apart = apart.max(behind);
                    }
                }
                ensure!(change.wait(SOON)?.success(), "{}", change.stderr());
                ensure!(
                    apart <= ROUND,
                    "the two ends of {apart} connections were apart at once"
                );
                for node in [&net.a, &net.b] {
                    wait("all of them to have moved", || {
                        sorted(node).is_ok_and(|(bumped, _)| bumped.len() == on_bump)
                    })?;
                }
            }
            talks.end()
        })
    });
}

/// A gateway moves so many connections of its network that it masquerades. Each command is repeated so often, at most.
fn masqueraded(many: usize, repeated: usize) -> Result<()> {
    Setup::new().gateways().run(|net| {
        net.a
            .host
            .run("iptables -t nat -A POSTROUTING -o eth0 -j MASQUERADE")?;
        let talks = Talks::between(&net.behind[0], &net.b.host, many)?;
        for (change, on_bump) in [("enable", many), ("disable", 0)] {
            // A busy machine may not show in time what plain carries, and says so.
            for round in 0.. {
                let mut change = begin(&net.a, change)?;
                if change.wait(SOON)?.success() {
                    break;
                }
                let said = change.stderr();
                ensure!(
                    round < repeated && said.contains("repeat the command"),
                    "{said}"
                );
            }
            for node in [&net.a, &net.b] {
                wait("all of them to have moved", || {
                    sorted(node).is_ok_and(|(bumped, _)| bumped.len() == on_bump)
                })?;
            }
        }
        talks.end()
    })
}

#[test]
fn many_connections_of_a_masqueraded_network_move_together() {
    isolated(|| masqueraded(200, 0));
}

#[test]
#[ignore = "takes half a minute"]
fn two_thousand_connections_of_a_masqueraded_network_move_together() {
    isolated(|| masqueraded(2000, 3));
}

/// Which choice stands is decided for each connection, and it is the same at both ends.
#[test]
fn choices_of_both_hosts_for_many_connections_cross() {
    isolated(|| {
        Setup::new().run(|net| {
            let talks = Talks::start(net)?;
            for (of_a, of_b) in [
                ("enable", "disable"),
                ("disable", "enable"),
                ("enable", "enable"),
                ("disable", "disable"),
            ] {
                let mut changes = [begin(&net.a, of_a)?, begin(&net.b, of_b)?];
                for change in &mut changes {
                    change.wait(SOON)?;
                }
                let on_bump = wait_together(net)?;
                let agreed = match (of_a, of_b) {
                    ("enable", "enable") => on_bump == MANY,
                    ("disable", "disable") => on_bump == 0,
                    _ => true,
                };
                let said = changes.map(|change| change.stderr());
                ensure!(agreed, "{of_a} and {of_b}: {on_bump} on the bump, {said:?}");
            }
            talks.end()
        })
    });
}

/// What it had begun the next daemon brings to an end.
#[test]
fn a_daemon_is_killed_while_it_moves_many_connections() {
    isolated(|| {
        Setup::new().run(|net| {
            let talks = Talks::start(net)?;
            for (change, on_bump) in [("enable", MANY), ("disable", 0)] {
                let mut change = begin(&net.a, change)?;
                wait("some to have moved", || {
                    sorted(&net.b).is_ok_and(|(bumped, _)| bumped.len() != MANY - on_bump)
                })?;
                net.a.stop(Signal::SIGKILL)?;
                change.wait(SOON)?;
                net.a.start()?;
                net.wait_established()?;
                let mut moved = 0;
                let all = wait("all to have moved", || {
                    moved = wait_together(net).unwrap_or(moved);
                    moved == on_bump
                });
                all.with_context(|| format!("{moved} are on the bump"))?;
            }
            talks.end()
        })
    });
}

/// A daemon that is busy hears of all of it later, whatever the system lets sockets hold.
#[test]
fn what_happens_to_many_connections_at_once_is_not_missed() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.bumped()?;
            let strangers = net.a.host.in_ns(|| UdpSocket::bind("10.0.1.1:0"))?;
            if setsockopt(&strangers, sockopt::RcvBufForce, &EVENTS).is_err() {
                println!("only root of the host lets a socket hold more");
                return talk.finish();
            }
            net.a.suspend()?;
            for port in 10_000..10_000 + EVENTS as u16 {
                strangers.send_to(b"each of these is an entry of its own", ("10.0.1.2", port))?;
            }
            let lost = events_lost(&net.a);
            net.a.go_on()?;
            let lost = lost?;
            ensure!(lost == 0, "{lost} events of conntrack were lost");
            talk.finish()
        })
    });
}

/// Messages that sockets which follow conntrack did not take.
fn events_lost(node: &Node) -> Result<u64> {
    let sockets = node.host.run("cat /proc/net/netlink")?;
    let mut lost = 0;
    for socket in sockets.lines().skip(1) {
        let fields: Vec<_> = socket.split_whitespace().collect();
        // Of NETLINK_NETFILTER, and in the groups for new, changed and deleted connections.
        if fields[1] == "12" && fields[3] == "00000007" {
            lost += fields[8].parse::<u64>()?;
        }
    }
    Ok(lost)
}

/// Its part of the processors would be one of many, and what it carries be lost before it is read.
#[test]
fn the_data_path_goes_before_programs_that_leave_it_little() {
    isolated_alone(|| {
        let rule = "bump = \"scramble\"\nprotocol = \"tcp\"\ndport = 7000";
        Setup::new().rule(rule).run(|net| {
            let spawn = |node: &Node, program, arguments: &[&str]| {
                let mut command = node.host.command(program);
                command.args(arguments);
                node.host.spawn(command)
            };
            let serve = ["--server", "--one-off", "--port", "7000"];
            let _server = spawn(&net.b, "iperf3", &serve)?;
            wait("iperf3", || net.b.host.is_listening(7000).unwrap_or(false))?;
            let send = ["--client", "10.0.1.2", "--port", "7000", "--time", "600"];
            let _client = spawn(&net.a, "iperf3", &send)?;
            let crowd = |_| spawn(&net.a, "sh", &["-c", "while :; do :; done"]);
            let _crowd = (0..12).map(crowd).collect::<Result<Vec<Process>>>()?;
            // Only root of the host lets a program do so.
            let refused = || net.a.log().contains("cannot raise its priority");
            wait("the data path to go before others", || {
                let taken = net.a.counter("processor_scarce");
                taken.is_ok_and(|taken| taken > 0) || refused()
            })?;
            // So does the main thread, whose programs steer.
            let pid = net.a.pid().context("the daemon")?;
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
            let nice = stat.split(' ').nth(18).context("niceness")?;
            ensure!(refused() || nice == "-15", "{nice}: {stat}");
            Ok(())
        })
    });
}
