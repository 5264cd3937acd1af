//! The host's directory of users does not answer, as a server that is asked over the network.

use std::os::unix::net::{UnixDatagram, UnixListener};

use anyhow::{Context as _, Result, ensure};
use netns_tests::daemon::wait;
use netns_tests::{Node, Setup, isolated};

/// Somebody who is asked for users on a host before anybody else (nscd), and says nothing: the C library waits for some
/// seconds.
fn silent_directory(node: &Node) -> Result<UnixListener> {
    let directory = node.host.run_dir().join("nscd");
    std::fs::create_dir_all(&directory).context("directory of nscd")?;
    let listener = UnixListener::bind(directory.join("socket")).context("socket of nscd")?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Signs of life that systemd was given since the last look.
fn signs_of_life(systemd: &UnixDatagram) -> usize {
    let mut said = vec![0; 1 << 12];
    let mut signs = 0;
    while let Ok(length) = systemd.recv(&mut said) {
        signs += usize::from(said[..length].starts_with(b"WATCHDOG=1"));
    }
    signs
}

#[test]
fn a_reload_that_waits_for_the_directory_of_users_holds_up_nothing_else() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            let socket = net.a.host.run_dir().join("notify");
            let systemd = UnixDatagram::bind(socket).context("socket of systemd")?;
            systemd.set_nonblocking(true)?;
            net.a
                .precede("export NOTIFY_SOCKET=/run/notify WATCHDOG_USEC=1500000");
            net.start()?;
            let directory = silent_directory(&net.a)?;
            net.a.configure_more(
                "\n[[rule]]\nbump = \"scramble\"\ndport = 7001\nuser = \"nobody\"\n",
            )?;
            net.a.reload()?;
            wait("the directory to be asked", || directory.accept().is_ok())?;
            signs_of_life(&systemd);
            let mut signs = 0;
            wait("signs of life", || {
                signs += signs_of_life(&systemd);
                signs >= 3
            })?;
            // A user changes something, too.
            let rule = ["rule", "add", "--dport", "9", "--bump", "scramble"];
            net.a.ctl(&rule)?;
            let reloaded = || {
                net.a
                    .log()
                    .contains("1 rule(s) of the configuration file are in force")
            };
            ensure!(!reloaded(), "the directory was not waited for");
            wait("word of what is waited for", || {
                net.a.log().contains("could not be looked up for 2 s")
            })?;
            // Iptables asks as well.
            drop(directory);
            wait("the rules of the file", reloaded)?;
            ensure!(net.a.ctl(&["rule", "list"])?.as_array().map(Vec::len) == Some(2));
            Ok(())
        })
    });
}
