//! The commands of docs/guides.md, as they stand there.

use anyhow::{Context as _, Result, ensure};
use netns_tests::{Net, Setup, isolated};

const GUIDES: &str = include_str!("../../../docs/guides.md");

/// The commands of a guide that the daemon has to answer, without `sudo dibsctl`; its interfaces are the paths here.
fn commands(title: &str) -> Result<Vec<String>> {
    let (_, guide) = GUIDES
        .split_once(&format!("## {title}\n"))
        .context("no such guide")?;
    let guide = guide.split("\n## ").next().unwrap_or_default();
    let lines = guide.lines().filter_map(|line| {
        let command = line.strip_prefix("    ")?.split('#').next()?;
        command.trim().strip_prefix("sudo dibsctl ")
    });
    let asked = lines.filter(|line| !line.starts_with("init") && !line.starts_with("eavesdrop"));
    let named = |line: &str| line.replace("lte0", "wlan").replace("wan0", "eth");
    let commands: Vec<_> = asked.map(named).collect();
    ensure!(!commands.is_empty(), "{title} asks for nothing");
    Ok(commands)
}

/// Runs one: quotes hold a word together.
fn run(net: &Net, command: &str) -> Result<()> {
    let pieces = command.split('"').enumerate();
    let words: Vec<&str> = pieces
        .flat_map(|(at, piece)| match at % 2 {
            0 => piece.split_whitespace().collect(),
            _ => vec![piece],
        })
        .collect();
    net.a.ctl(&words).context(command.to_owned())?;
    Ok(())
}

#[test]
fn two_servers_with_wan_and_lte() {
    isolated(|| {
        Setup::new().run(|net| {
            for command in commands("Two servers with WAN and LTE")? {
                run(net, &command)?;
            }
            let talk = net.talk(22)?;
            net.wait_bump(22, "seal")?;
            let before = net.a.path("wlan")?["bytes_sent"].as_u64();
            talk.advance(2 << 20)?;
            let carried = net.a.path("wlan")?["bytes_sent"].as_u64();
            let carried = carried.zip(before).map(|(now, before)| now - before);
            ensure!(carried.is_some_and(|bytes| bytes < 64 << 10), "{carried:?}");
            talk.finish()
        })
    });
}

#[test]
fn a_database_replica_that_is_sealed_during_backups() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.talk(5432)?;
            let [enable, disable, rule] =
                &commands("A database replica that is sealed during backups")?[..]
            else {
                anyhow::bail!("the guide has other commands");
            };
            talk.advance(1 << 20)?;
            run(net, enable)?;
            net.wait_bump(5432, "seal")?;
            talk.advance(1 << 20)?;
            run(net, disable)?;
            net.wait_bump(5432, "plain")?;
            run(net, rule)?;
            talk.finish()
        })
    });
}

#[test]
fn scramble_for_a_laboratory_course() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.talk(80)?;
            talk.advance(1 << 20)?;
            for command in commands("Scramble for a laboratory course")? {
                run(net, &command)?;
            }
            net.wait_bump(80, "scramble")?;
            talk.finish()
        })
    });
}

#[test]
fn encrypt_one_running_transfer() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.talk(873)?;
            talk.advance(1 << 20)?;
            let [list, enable, disable] = &commands("Encrypt one running transfer")?[..] else {
                anyhow::bail!("the guide has other commands");
            };
            run(net, list)?;
            run(net, enable)?;
            net.wait_bump(873, "seal")?;
            talk.advance(1 << 20)?;
            run(net, disable)?;
            net.wait_bump(873, "plain")?;
            talk.finish()
        })
    });
}

#[test]
fn ssh_on_a_bump() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.talk(22)?;
            for command in commands("ssh on a bump, without locking yourself out")? {
                run(net, &command)?;
            }
            net.wait_bump(22, "seal")?;
            talk.finish()
        })
    });
}

#[test]
fn a_household_and_a_stage_with_several_uplinks() {
    isolated(|| {
        Setup::new().run(|net| {
            let guides = [
                "A household with DSL and LTE",
                "A stage with three LTE modems",
            ];
            for command in guides
                .map(commands)
                .into_iter()
                .collect::<Result<Vec<_>>>()?
                .concat()
            {
                run(net, &command)?;
            }
            for port in [443, 9000] {
                let talk = net.talk(port)?;
                net.wait_bump(port, "seal")?;
                talk.advance(1 << 20)?;
                talk.finish()?;
            }
            Ok(())
        })
    });
}
