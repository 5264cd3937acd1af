//! Hosts, links and processes of the lab on the real kernel.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::process::parent_id;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use dibs_lab::{Capture, End, Lab, Link, LinkSpec};
use dibs_netns::{HANG, Host, isolated, wait_until};

fn two_hosts() -> Result<(Lab, Host, Host, Link)> {
    let mut lab = Lab::new()?;
    let a = lab.host("a")?;
    let b = lab.host("b")?;
    let link = lab.link(LinkSpec::new(
        &a,
        "eth0",
        "10.0.1.1/24 fd01::1/64",
        &b,
        "eth0",
        "10.0.1.2/24 fd01::2/64",
    ))?;
    Ok((lab, a, b, link))
}

/// One exchange of bytes over TCP.
fn talk(from: &Host, to: &Host, address: &str) -> Result<()> {
    let address: SocketAddr = address.parse()?;
    let listener = to.in_ns(|| TcpListener::bind(address))?;
    let mut there = from.in_ns(|| TcpStream::connect_timeout(&address, HANG))?;
    let (mut here, _) = listener.accept()?;
    there.write_all(b"dibs")?;
    let mut received = [0; 4];
    here.set_read_timeout(Some(HANG))?;
    here.read_exact(&mut received)?;
    assert_eq!(&received, b"dibs");
    Ok(())
}

#[test]
fn outside_its_namespaces_the_lab_refuses() {
    assert!(!dibs_netns::is_inside());
    let error = Lab::new().unwrap_err().to_string();
    assert!(error.contains("namespaces of its own"), "{error}");
}

#[test]
fn with_threads_running_the_lab_is_not_entered() {
    let error = dibs_netns::enter().unwrap_err().to_string();
    assert!(error.contains("before threads"), "{error}");
}

#[test]
fn namespaces_are_not_the_machines() {
    // The test's second process inherits the first one's view in a file.
    let namespaces = || -> std::io::Result<Vec<_>> {
        ["net", "mnt"]
            .iter()
            .map(|kind| std::fs::read_link(format!("/proc/self/ns/{kind}")))
            .collect()
    };
    let first = if dibs_netns::is_inside() {
        parent_id()
    } else {
        std::process::id()
    };
    let note = std::env::temp_dir().join(format!("dibs-lab-{first}"));
    if !dibs_netns::is_inside() {
        std::fs::write(&note, format!("{:?}", namespaces().unwrap())).unwrap();
    }
    isolated(|| {
        let machine = std::fs::read_to_string(&note)?;
        for own in namespaces()? {
            assert!(
                !machine.contains(&format!("{own:?}")),
                "{own:?} is the machine's"
            );
        }
        assert!(dibs_netns::is_inside());
        Ok(())
    });
    std::fs::remove_file(note).unwrap();
}

#[test]
#[should_panic(expected = "failed in its namespaces")]
fn a_failing_body_fails_the_test() {
    isolated(|| anyhow::bail!("on purpose"));
}

#[test]
fn hosts_talk_over_a_plain_link() {
    isolated(|| {
        let (_lab, a, b, _link) = two_hosts()?;
        talk(&a, &b, "10.0.1.2:700")?;
        talk(&b, &a, "[fd01::1]:700")?;
        let counters = b.counters("eth0")?;
        assert!(
            counters.rx_packets >= 3 && counters.tx_packets >= 3,
            "{counters:?}"
        );
        Ok(())
    });
}

#[test]
fn hosts_are_apart_but_for_their_links() {
    isolated(|| {
        let (mut lab, a, _b, _link) = two_hosts()?;
        let c = lab.host("c")?;
        assert!(lab.host("c").is_err(), "the name is taken");
        assert!(
            c.run("ip -o link")?
                .lines()
                .all(|line| line.contains("lo:"))
        );
        let unreachable = c.in_ns(|| UdpSocket::bind("0.0.0.0:0")?.connect("10.0.1.1:9"));
        assert!(unreachable.is_err());
        // Each has a /run of its own, which the lab sees from outside.
        a.run("touch /run/of-a")?;
        assert!(a.run_dir().join("of-a").exists());
        assert!(c.run("ls /run/of-a").is_err());
        Ok(())
    });
}

#[test]
fn commands_run_on_their_host_where_the_caller_stands() {
    isolated(|| {
        let (_lab, a, _b, _link) = two_hosts()?;
        let output = a
            .command("ip")
            .args(["-br", "address", "show", "eth0"])
            .output()?;
        assert!(String::from_utf8(output.stdout)?.contains("10.0.1.1/24"));
        let here = std::env::current_dir()?;
        assert_eq!(Path::new(a.run("pwd")?.trim()), here);
        let mut elsewhere = a.command("pwd");
        elsewhere.current_dir("/proc");
        assert_eq!(a.run_within(HANG, elsewhere)?.stdout, b"/proc\n");
        let error = a.run("ip link show eth7").unwrap_err().to_string();
        assert!(
            error.contains("ip link show eth7") && error.contains("host a"),
            "{error}"
        );
        assert!(a.run("no-such-program").is_err());
        Ok(())
    });
}

#[test]
fn a_command_over_time_is_killed() {
    isolated(|| {
        let mut lab = Lab::new()?;
        let a = lab.host("a")?;
        // For longer than a test may take.
        let mut sleep = a.command("sleep");
        sleep.arg("1000");
        let error = a.run_within(Duration::from_millis(100), sleep).unwrap_err();
        assert!(format!("{error:#}").contains("sleep 1000"), "{error:#}");
        Ok(())
    });
}

#[test]
fn processes_die_with_their_handle_and_with_their_host() {
    isolated(|| {
        let mut lab = Lab::new()?;
        let a = lab.host("a")?;
        let sleep = || {
            let mut command = a.command("sleep");
            command.arg("1000");
            a.spawn(command)
        };
        let gone = |pid: u32| {
            // A killed child of ours that nobody waited for stays a zombie.
            std::fs::read_to_string(format!("/proc/{pid}/stat"))
                .map_or(true, |stat| stat.contains(") Z "))
        };
        let held = sleep()?;
        let pid = held.id();
        assert!(!gone(pid));
        drop(held);
        assert!(gone(pid));

        let leaked = sleep()?;
        let pid = leaked.id();
        std::mem::forget(leaked);
        drop(a);
        wait_until(HANG, "the end of the host's process", || gone(pid))
    });
}

#[test]
fn output_is_kept_and_waited_for() {
    isolated(|| {
        let mut lab = Lab::new()?;
        let a = lab.host("a")?;
        let mut shell = a.command("sh");
        shell.args(["-c", "echo ready; echo aside >&2; exec sleep 1000"]);
        let mut process = a.spawn(shell)?;
        process.wait_for_output("ready", HANG)?;
        process.wait_for_output("aside", HANG)?;
        assert_eq!(
            (process.stdout().as_str(), process.stderr().as_str()),
            ("ready\n", "aside\n")
        );
        assert!(process.is_running());

        let mut shell = a.command("sh");
        shell.args(["-c", "echo done"]);
        let error = a.spawn(shell)?.wait_for_output("ready", HANG).unwrap_err();
        assert!(
            format!("{error:#}").contains("without printing"),
            "{error:#}"
        );
        Ok(())
    });
}

#[test]
fn listening_ports_are_seen() {
    isolated(|| {
        let (_lab, a, b, _link) = two_hosts()?;
        assert!(!b.is_listening(7001)?);
        let _v4 = b.in_ns(|| TcpListener::bind("10.0.1.2:7001"))?;
        let _v6 = b.in_ns(|| TcpListener::bind("[::]:7002"))?;
        assert!(b.is_listening(7001)? && b.is_listening(7002)?);
        assert!(!a.is_listening(7001)?);
        Ok(())
    });
}

#[test]
fn interfaces_go_down_and_come_back() {
    isolated(|| {
        let (_lab, a, b, link) = two_hosts()?;
        link.down(End::A)?;
        assert!(
            a.in_ns(|| UdpSocket::bind("0.0.0.0:0")?.connect("10.0.1.2:9"))
                .is_err()
        );
        link.up(End::A)?;
        talk(&a, &b, "10.0.1.2:700")?;
        link.set_mtu(1280)?;
        assert!(b.run("ip link show eth0")?.contains("mtu 1280"));
        link.remove()?;
        assert!(a.counters("eth0").is_err());
        Ok(())
    });
}

#[test]
fn sysctls_are_the_hosts_own() {
    isolated(|| {
        let (_lab, a, b, _link) = two_hosts()?;
        b.sysctl("net.ipv4.ip_forward", "0")?;
        a.sysctl("net.ipv4.ip_forward", "1")?;
        let value = |host: &Host| host.run("cat /proc/sys/net/ipv4/ip_forward");
        assert_eq!((value(&a)?.trim(), value(&b)?.trim()), ("1", "0"));
        let error = a.sysctl("net.no_such", "1").unwrap_err();
        assert!(format!("{error:#}").contains("net.no_such"));
        Ok(())
    });
}

#[test]
fn a_capture_sees_both_directions() {
    isolated(|| {
        let (_lab, a, b, _link) = two_hosts()?;
        let capture = Capture::start(&a, "eth0")?;
        talk(&a, &b, "10.0.1.2:700")?;
        wait_until(HANG, "the payload", || capture.has_seen(b"dibs"))?;
        let recording = capture.finish()?;
        assert!(recording.contains(b"dibs"));
        assert!(!recording.contains(b"never sent"));
        for outgoing in [true, false] {
            assert!(
                recording
                    .packets
                    .iter()
                    .any(|packet| packet.outgoing == outgoing)
            );
        }
        Ok(())
    });
}

#[test]
fn a_host_has_policy_routing_and_a_firewall() {
    isolated(|| {
        let (_lab, a, _b, _link) = two_hosts()?;
        a.run("ip rule add fwmark 0x1000000/0x3f000000 lookup 5200")
            .context("RPDB")?;
        a.run("iptables -w -t mangle -A OUTPUT -p tcp -j MARK --set-xmark 0x1000000/0x3f000000")
            .context("iptables")?;
        a.run("conntrack -L").context("conntrack")?;
        Ok(())
    });
}

#[test]
fn a_host_has_tun_devices() {
    isolated(|| {
        let mut lab = Lab::new()?;
        let made = lab.host("a")?.run("ip tuntap add tun5 mode tun");
        made.context("/dev/net/tun has to be open to everyone (0666), as udev makes it")?;
        Ok(())
    });
}
