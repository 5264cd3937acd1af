//! Data through a bump arrives, whatever carries it.

use anyhow::{Context as _, Result, ensure};
use dibs_netns::wait_until;
use netns_tests::daemon::{SOON, wait};
use netns_tests::topology::{server, server_v6};
use netns_tests::traffic::{Talk, echo, ping};
use netns_tests::{Net, Setup, isolated};

const RULE: &str = "bump = \"scramble\"\ndport = [80, \"7000-7031\"]";

/// Bytes that `a` has sent by a path.
fn sent(net: &Net, path: &str) -> Result<u64> {
    let path = net.a.path(path)?;
    path["bytes_sent"].as_u64().context("bytes_sent")
}

#[test]
fn both_ways_at_once() {
    isolated(|| {
        Setup::new().rule(RULE).run(|net| {
            let ears = net.eavesdrop()?;
            let talk = net.talk(7000)?;
            talk.advance(4 << 20)?;
            net.wait_bump(7000, "scramble")?;
            talk.finish_unheard(ears, 8 << 20)
        })
    });
}

#[test]
fn both_paths_carry_it() {
    isolated(|| {
        Setup::new().rule(RULE).run(|net| {
            // Links so slow that both are needed, however busy the machine is.
            net.eth.shape(20_000_000)?;
            net.wlan.shape(20_000_000)?;
            let before = [sent(net, "eth")?, sent(net, "wlan")?];
            let talk = net.talk(7000)?;
            talk.advance(6 << 20)?;
            wait("both paths to carry a megabyte", || {
                let carries = |(path, before): (&&str, u64)| {
                    sent(net, path).is_ok_and(|sent| sent - before > 1 << 20)
                };
                ["eth", "wlan"].iter().zip(before).all(carries)
            })?;
            talk.finish()
        })
    });
}

#[test]
fn paths_of_the_longest_packets() {
    isolated(|| {
        Setup::new().rule(RULE).without_daemons().run(|net| {
            for host in [&net.a.host, &net.b.host] {
                for interface in ["eth0", "wlan0"] {
                    // The token bucket takes no packet that is longer than its burst.
                    host.run(&format!("tc qdisc del dev {interface} root"))?;
                    host.run(&format!("ip link set {interface} mtu 65535"))?;
                }
            }
            net.start()?;
            // No datagram is longer, whatever the path takes.
            for path in ["eth", "wlan"] {
                wait("the longest datagrams", || {
                    net.a.path(path).is_ok_and(|path| path["mtu"] == 32_799)
                })?;
            }
            let ears = net.eavesdrop()?;
            let talk = net.talk(7000)?;
            talk.advance(16 << 20)?;
            net.wait_bump(7000, "scramble")?;
            talk.finish_unheard(ears, 8 << 20)
        })
    });
}

#[test]
fn short_connections() {
    isolated(|| {
        Setup::new().rule(RULE).run(|net| {
            const PAGES: usize = 100;
            let site = net.b.host.run_dir().join("site");
            std::fs::create_dir(&site)?;
            std::fs::write(site.join("page"), b"one page of many\n")?;
            let config = "daemon off; error_log stderr; pid /run/nginx.pid; user root; \
                 events {} \
                 http { access_log off; client_body_temp_path /run/body; \
                 proxy_temp_path /run/proxy; fastcgi_temp_path /run/fastcgi; \
                 uwsgi_temp_path /run/uwsgi; scgi_temp_path /run/scgi; \
                 server { listen 80; root /run/site; } }";
            std::fs::write(net.b.host.run_dir().join("nginx.conf"), config)?;
            let mut nginx = net.b.host.command("nginx");
            nginx.args(["-c", "/run/nginx.conf"]);
            let mut nginx = net.b.host.spawn(nginx)?;
            wait_until(SOON, "nginx", || {
                net.b.host.is_listening(80).unwrap_or(false) || !nginx.is_running()
            })?;
            ensure!(nginx.is_running(), "nginx: {}", nginx.stderr());

            let before = sent(net, "eth")?;
            let mut curl = net.a.host.command("curl");
            curl.args(["--silent", "--show-error", "--fail", "--max-time", "120"]);
            curl.args(["--header", "Connection: close"]);
            curl.arg(format!("http://10.0.1.2/page?[1-{PAGES}]"));
            let output = net.a.host.run_within(SOON * 2, curl)?;
            let expected = "one page of many\n".repeat(PAGES);
            ensure!(output.stdout == expected.as_bytes(), "pages are wrong");
            // The first bytes of each connection, its request, are the trusted path's to carry.
            let carried = sent(net, "eth")? - before;
            ensure!(
                carried > 65 * PAGES as u64,
                "the bump carried {carried} bytes"
            );
            Ok(())
        })
    });
}

#[test]
fn many_connections() {
    isolated(|| {
        Setup::new().rule(RULE).run(|net| {
            const BYTES: usize = 128 << 10;
            let before = sent(net, "eth")? + sent(net, "wlan")?;
            let (a, b) = (&net.a.host, &net.b.host);
            std::thread::scope(|scope| {
                let echoes: Vec<_> = (7000..7032)
                    .map(|port| scope.spawn(move || echo(a, b, server(port), BYTES)))
                    .collect();
                echoes.into_iter().try_for_each(|echo| {
                    let result = echo.join();
                    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                })
            })?;
            let carried = sent(net, "eth")? + sent(net, "wlan")? - before;
            ensure!(
                carried > 32 * BYTES as u64,
                "the bump carried {carried} bytes"
            );
            Ok(())
        })
    });
}

#[test]
fn iperf3_both_ways() {
    isolated(|| {
        Setup::new().rule(RULE).run(|net| {
            let mut serve = net.b.host.command("iperf3");
            serve.args(["--server", "--one-off", "--port", "7000"]);
            let mut server = net.b.host.spawn(serve)?;
            wait_until(SOON, "iperf3", || {
                net.b.host.is_listening(7000).unwrap_or(false)
            })?;
            let mut client = net.a.host.command("iperf3");
            client.args(["--client", "10.0.1.2", "--port", "7000", "--json"]);
            client.args(["--bidir", "--parallel", "2", "--time", "2"]);
            net.a.host.run_within(SOON, client)?;
            ensure!(server.wait(SOON)?.success(), "{}", server.stderr());
            Ok(())
        })
    });
}

#[test]
fn ipv6_inside() {
    isolated(|| {
        Setup::new().rule(RULE).run(|net| {
            let ears = net.eavesdrop()?;
            let talk = Talk::start(&net.a.host, &net.b.host, server_v6(7000))?;
            talk.advance(2 << 20)?;
            net.wait_bump(7000, "scramble")?;
            talk.finish_unheard(ears, 4 << 20)
        })
    });
}

#[test]
fn ipv6_outside() {
    isolated(|| {
        Setup::new().ipv6().rule(RULE).run(|net| {
            let ears = net.eavesdrop()?;
            for address in [server(7000), server_v6(7001)] {
                let talk = Talk::start(&net.a.host, &net.b.host, address)?;
                talk.advance(1 << 20)?;
                talk.finish()?;
            }
            let heard = ears.finish()?;
            // 0800: IPv4, behind two Ethernet addresses.
            let is_ipv4 = |frame: &[u8]| frame.get(12..14) == Some(&[8, 0]);
            let bytes = |v4| {
                [&heard.eth, &heard.wlan].map(|link| {
                    let packets = link.packets.iter();
                    let those = packets.filter(|packet| is_ipv4(&packet.frame) == v4);
                    those.map(|packet| packet.frame.len()).sum::<usize>()
                })
            };
            ensure!(bytes(true) == [0; 2], "{:?} bytes in IPv4", bytes(true));
            // How much each carries is not the point: a busy machine may have one carry most.
            let [eth, wlan] = bytes(false);
            let carried = eth.min(wlan) > 64 << 10 && eth + wlan > 4 << 20;
            ensure!(carried, "{eth} and {wlan} bytes in IPv6");
            Ok(())
        })
    });
}

#[test]
fn udp_and_icmp_go_beside_it() {
    isolated(|| {
        Setup::new().rule(RULE).run(|net| {
            let talk = net.talk(7000)?;
            talk.advance(1 << 20)?;
            let (a, b) = (&net.a.host, &net.b.host);
            for address in [server(0), server_v6(0)] {
                ping(a, address.ip())?;
            }
            // A port that a rule names, for TCP.
            let mut echo = b.command("socat");
            echo.args(["UDP6-RECVFROM:7000,fork,ipv6only=0", "EXEC:cat"]);
            let mut echo = b.spawn(echo)?;
            for address in ["UDP4:10.0.1.2:7000", "UDP6:[fd00:1::2]:7000"] {
                wait("an answer by UDP", || {
                    let mut client = a.command("sh");
                    let line = format!("echo dibs | socat -T 1 -t 1 - {address}");
                    client.args(["-c", &line]);
                    let answer = a.run_within(SOON, client);
                    answer.is_ok_and(|answer| answer.stdout == b"dibs\n")
                })?;
            }
            ensure!(echo.is_running(), "{}", echo.stderr());
            talk.advance(1 << 20)?;
            talk.finish()
        })
    });
}
