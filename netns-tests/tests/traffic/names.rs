//! Peers whose endpoints are names, and interfaces that go by another name.

use anyhow::{Result, ensure};
use netns_tests::daemon::wait;
use netns_tests::{Net, Node, Setup, isolated};
use nix::sys::signal::Signal;
use serde_json::json;

/// Gives a host a resolver of its own, which knows these names alone: what /etc/hosts would say.
fn resolver(node: &Node, names: &str) -> Result<()> {
    let files = node.host.run_dir();
    std::fs::write(files.join("hosts"), names)?;
    std::fs::write(files.join("resolv.conf"), "nameserver 127.0.0.1\n")?;
    std::fs::write(files.join("nsswitch.conf"), "hosts: files dns\n")?;
    node.host.shell(
        "for file in hosts resolv.conf nsswitch.conf; do\n\
         touch /etc/$file 2>/dev/null || true\n\
         mount --bind /run/$file /etc/$file\n\
         done",
    )?;
    Ok(())
}

/// Replaces the names of [`resolver`].
fn rename(node: &Node, names: &str) -> Result<()> {
    // In place, for the file is what is mounted.
    std::fs::write(node.host.run_dir().join("hosts"), names)?;
    Ok(())
}

/// Replaces words of the configuration that the next daemon of a host reads.
fn reword(node: &Node, words: &[(&str, &str)]) -> Result<()> {
    let mut config = std::fs::read_to_string(node.directory().join("dibsd.toml"))?;
    for (from, to) in words {
        ensure!(config.contains(from), "no {from} in {config}");
        config = config.replace(from, to);
    }
    node.configure(&config)
}

fn remote(net: &Net, path: &str) -> Result<String> {
    Ok(net.a.path(path)?["remote"]
        .as_str()
        .unwrap_or_default()
        .to_owned())
}

/// Like a home whose provider gives it another address, which dynamic DNS follows.
#[test]
fn a_peer_is_found_again_at_what_its_name_means_now() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            resolver(&net.a, "10.0.1.2 wan.home.test\n10.0.2.2 lte.home.test\n")?;
            let names = [
                ("\"10.0.1.2:5300\"", "\"wan.home.test:5300\""),
                ("\"10.0.2.2:5300\"", "\"lte.home.test:5300\""),
            ];
            reword(&net.a, &names)?;
            // It waits to be called.
            reword(&net.b, &[("eth = \"10.0.1.1:5300\"\n", "")])?;
            net.start()?;
            net.bumped()?.finish()?;
            ensure!(remote(net, "eth")? == "10.0.1.2:5300");

            // One that went on would be heard from there by the path that may roam.
            net.b.stop(Signal::SIGTERM)?;
            for (net_number, interface) in [(1, "eth0"), (2, "wlan0")] {
                let of = |host: u8| format!("10.0.{net_number}.{host}/24 dev {interface}");
                net.b.host.run(&format!("ip address del {}", of(2)))?;
                net.b.host.run(&format!("ip address add {}", of(22)))?;
            }
            net.a.wait_path("eth", "down")?;
            net.a.wait_path("wlan", "down")?;
            rename(&net.a, "10.0.1.22 wan.home.test\n10.0.2.22 lte.home.test\n")?;
            net.b.start()?;
            net.wait_established()?;
            ensure!(remote(net, "eth")? == "10.0.1.22:5300");
            ensure!(remote(net, "wlan")? == "10.0.2.22:5300");
            let paths = net.a.ctl(&["path", "list"])?;
            ensure!(paths.as_array().map(Vec::len) == Some(2), "{paths:#}");
            Ok(())
        })
    });
}

#[test]
fn a_name_that_means_nothing_is_told_and_holds_up_nothing_else() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            resolver(&net.a, "")?;
            reword(&net.a, &[("\"10.0.2.2:5300\"", "\"lte.home.test:5300\"")])?;
            let why = "the name lte.home.test cannot be resolved";
            let said = net.a.diagnosis("path")?;
            ensure!(said.contains(why), "{said}");
            net.b.start()?;
            net.a.start()?;
            net.a.wait_path("eth", "up")?;
            let of_path = || {
                let path = net.a.path("wlan");
                path.map_or(String::new(), |path| path["reason"].to_string())
            };
            wait("the resolver's word", || of_path().contains(why))?;
            let peers = net.a.ctl(&["peer", "list"])?;
            let endpoints = &peers[0]["endpoints"];
            ensure!(
                endpoints[0]["addresses"] == json!(["10.0.1.2:5300"]),
                "{peers:#}"
            );
            ensure!(endpoints[0]["fault"].is_null(), "{peers:#}");
            ensure!(
                endpoints[1]["endpoint"] == "lte.home.test:5300",
                "{peers:#}"
            );
            ensure!(endpoints[1]["fault"].to_string().contains(why), "{peers:#}");
            ensure!(net.a.log().contains(why), "{}", net.a.log());
            let said = net.a.diagnosis("endpoint")?;
            ensure!(said.contains(why), "{said}");

            // Another network may have another resolver.
            rename(&net.a, "10.0.2.2 lte.home.test\n")?;
            net.a.host.run("ip address add 10.0.2.11/24 dev wlan0")?;
            net.wait_established()?;
            net.bumped()?.finish()
        })
    });
}

/// One IP version leads nowhere, as where a tunnel is down, or the provider has no IPv6.
#[test]
fn a_name_with_addresses_of_both_ip_versions() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            resolver(
                &net.a,
                "fd00:1::99 wan.test\n10.0.1.2 wan.test\nfd00:2::2 lte.test\n10.0.2.99 lte.test\n",
            )?;
            let names = [
                ("\"10.0.1.2:5300\"", "\"wan.test:5300\""),
                ("\"10.0.2.2:5300\"", "\"lte.test:5300\""),
            ];
            reword(&net.a, &names)?;
            reword(&net.b, &[("eth = \"10.0.1.1:5300\"\n", "")])?;
            net.start()?;
            ensure!(remote(net, "eth")? == "10.0.1.2:5300");
            ensure!(remote(net, "wlan")? == "[fd00:2::2]:5300");
            net.bumped()?.finish()
        })
    });
}

/// Somebody takes the question and says nothing.
#[test]
fn a_resolver_that_does_not_answer_holds_up_nothing() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            resolver(&net.a, "")?;
            let mut silent = net.a.host.command("socat");
            silent.args(["-u", "UDP4-RECV:53,bind=127.0.0.1", "STDOUT"]);
            let silent = net.a.host.spawn(silent)?;
            wait("the silent resolver", || {
                let said = net.a.host.run("ss -Hlun");
                said.is_ok_and(|said| said.contains("127.0.0.1:53"))
            })?;
            reword(&net.a, &[("\"10.0.2.2:5300\"", "\"lte.home.test:5300\"")])?;
            net.b.start()?;
            net.a.start()?;
            net.a.wait_path("eth", "up")?;
            wait("a question", || silent.stdout().contains("home"))?;
            let reason = net.a.path("wlan")?["reason"].to_string();
            ensure!(reason.contains("lte.home.test"), "{reason}");
            // Nor is its end, while a question is open.
            net.a.stop(Signal::SIGTERM)
        })
    });
}

/// Like a host after an upgrade that gave its cards other names.
#[test]
fn interfaces_by_their_alternative_names() {
    isolated(|| {
        let rule = "bump = \"seal\"\ndport = 7001\ninterface = \"an-uplink-of-the-laptop\"";
        Setup::new().rule(rule).without_daemons().run(|net| {
            let host = net.a.host.clone();
            let names = [
                (
                    "interface = \"eth0\"",
                    "interface = \"an-uplink-of-the-laptop\"",
                ),
                ("interface = \"wlan0\"", "interface = \"enxuplink\""),
            ];
            reword(&net.a, &names)?;
            host.run("ip link property add dev eth0 altname an-uplink-of-the-laptop")?;
            net.b.start()?;
            net.a.start()?;
            net.a.wait_path("eth", "up")?;
            net.a.wait_path("wlan", "down")?;
            host.run("ip link property add dev wlan0 altname enxuplink")?;
            net.wait_established()?;
            ensure!(net.a.path("wlan")?["interface"] == "wlan0");

            let ruled = net.talk(7001)?;
            net.wait_bump(7001, "seal")?;
            ruled.finish()?;
            let steered = |interface: &str| {
                let rules = net.a.host.run("iptables-save -t mangle");
                rules.is_ok_and(|rules| rules.contains(&format!("-o {interface} ")))
            };
            ensure!(steered("eth0"));
            host.run("ip link set eth0 name eth7")?;
            wait("the rule of the interface as it is called now", || {
                steered("eth7") && !steered("eth0")
            })?;
            let restored = net.a.counter("steering_restored")?;
            ensure!(restored == 0, "nobody else changed the steering");
            let renamed = net.talk(7001)?;
            net.wait_bump(7001, "seal")?;
            renamed.finish()?;
            let (answer, paths) = (net.a.doctor()?, net.a.diagnosis("path")?);
            ensure!(answer["ok"] == true, "{answer:#}");
            ensure!(!paths.contains("no interface"), "{paths}");
            Ok(())
        })
    });
}

/// Like a van whose modems come and go.
#[test]
fn a_path_takes_an_interface_that_its_pattern_names() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            let host = net.a.host.clone();
            let link = host.run("ip -br link show eth0")?;
            let address = link.split_whitespace().nth(2).unwrap_or_default();
            let eth = format!("interface = \"{address}\"");
            let patterns = [
                ("interface = \"eth0\"", eth.as_str()),
                ("interface = \"wlan0\"", "interface = \"w*\""),
            ];
            reword(&net.a, &patterns)?;
            net.b.start()?;
            net.a.start()?;
            net.wait_established()?;
            let is_on = |path: &str, name: &str| -> Result<()> {
                wait(&format!("path {path} on {name}"), || {
                    let path = net.a.path(path);
                    path.is_ok_and(|path| path["interface"] == name && path["state"] == "up")
                })
            };
            is_on("eth", "eth0")?;
            is_on("wlan", "wlan0")?;
            host.run("ip link set wlan0 name wwan3")?;
            is_on("wlan", "wwan3")?;
            host.run("ip link set wwan3 name other0")?;
            net.a.wait_path("wlan", "down")?;
            let path = net.a.path("wlan")?;
            ensure!(path["interface"] == "w*", "{path}");
            let why = path.to_string();
            ensure!(
                why.contains("no interface that another path has not taken is called w*"),
                "{why}"
            );
            host.run("ip link set other0 name wlx0")?;
            is_on("wlan", "wlx0")
        })
    });
}
