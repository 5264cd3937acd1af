//! Bad configurations: refused with file, line and hint, by both programs, before anything changes.

use std::os::unix::fs::PermissionsExt as _;

use anyhow::{Context as _, Result, ensure};
use netns_tests::{Setup, isolated, kernel};

const FILE: &str = "/run/dibs/dibsd.toml";

/// Changes one line of `a`'s configuration: it is refused at the place of the mark, and the words
/// are in what is said.
fn refused(line: &str, changed: &str, mark: &str, words: &[&str]) -> Result<()> {
    Setup::new().without_daemons().run(|net| {
        let file = net.a.directory().join("dibsd.toml");
        let good = std::fs::read_to_string(&file)?;
        ensure!(
            good.lines().any(|other| other == line),
            "no line {line:?}: {good}"
        );
        let bad = good.replacen(line, changed, 1);
        let (number, at) = bad
            .lines()
            .enumerate()
            .find_map(|(number, line)| Some((number + 1, line.find(mark)? + 1)))
            .context("the mark is in the file")?;
        std::fs::write(&file, bad)?;
        let place = format!("{FILE}:{number}:{at}: ");

        let before = kernel::state(&net.a.host)?;
        net.a.spawn()?;
        let by_dibsd = net.a.refusal()?;
        let by_dibsctl = net.a.refused(&["check", FILE])?;
        for said in [by_dibsd, by_dibsctl] {
            ensure!(said.contains(&place), "no {place:?}: {said}");
            for word in words {
                ensure!(said.contains(word), "no {word:?}: {said}");
            }
        }
        ensure!(
            kernel::state(&net.a.host)? == before,
            "the kernel's state changed"
        );
        Ok(())
    })
}

const KEY: &str = "private_key_file = \"/run/dibs/private.key\"";

#[test]
fn an_unknown_key() {
    isolated(|| {
        let changed = format!("{KEY}\ntrusted_shares = 0.1");
        refused(
            KEY,
            &changed,
            "trusted_shares",
            &["hint: ", "trusted_share"],
        )
    });
}

#[test]
fn a_value_of_the_wrong_type() {
    isolated(|| {
        let changed = format!("{KEY}\nport = \"5300\"");
        refused(KEY, &changed, "\"5300\"", &["port"])
    });
}

#[test]
fn an_unknown_bump() {
    isolated(|| {
        let line = "default_bump = \"scramble\"";
        let changed = "default_bump = \"scrambel\"";
        refused(line, changed, "\"scrambel\"", &["hint: ", "scramble"])
    });
}

#[test]
fn no_trusted_path() {
    isolated(|| {
        let changed = "trust = \"untrusted\"";
        let words = ["scramble", "needs a trusted path", "hint: ", "seal"];
        refused("trust = \"trusted\"", changed, "\"scramble\"", &words)
    });
}

#[test]
fn an_endpoint_on_no_path() {
    isolated(|| {
        let line = "wlan = \"10.0.2.2:5300\"";
        let changed = "wlam = \"10.0.2.2:5300\"";
        refused(line, changed, "wlam", &["hint: ", "wlan"])
    });
}

#[test]
fn a_key_file_that_others_may_read() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            let key = net.a.directory().join("private.key");
            std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o644))?;
            net.a.spawn()?;
            let said = net.a.refusal()?;
            ensure!(
                said.contains("/run/dibs/private.key") && said.contains("chmod"),
                "{said}"
            );
            Ok(())
        })
    });
}

#[test]
fn a_control_socket_in_the_place_of_a_file() {
    isolated(|| {
        let setup = Setup::new().key("control_socket = \"/run/dibs/private.key\"");
        setup.without_daemons().run(|net| {
            let before = kernel::state(&net.a.host)?;
            net.a.spawn()?;
            let said = net.a.refusal()?;
            ensure!(
                said.contains("control_socket /run/dibs/private.key is there, and is no socket"),
                "{said}"
            );
            net.a.private_key()?;
            ensure!(kernel::state(&net.a.host)? == before);
            Ok(())
        })
    });
}
