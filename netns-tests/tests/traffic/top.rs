//! `dibsctl top`.

use std::io::{Read as _, Write as _};
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use netns_tests::{Net, Setup, isolated, programs};

#[test]
fn it_tells_what_flows_by_path_bump_and_connection() {
    isolated(|| {
        Setup::new().run(|net| {
            // Both sides talk without end.
            let talk = net.bumped()?;
            let seen = net.a.ctl(&["top", "--interval", "0.5"])?;
            let flows = |row: &serde_json::Value| {
                let rate = |key: &str| row[key].as_f64().unwrap_or_default();
                rate("sent_rate") > 1e5 && rate("received_rate") > 1e5
            };
            let [conn] = seen["connections"]
                .as_array()
                .context("connections")?
                .as_slice()
            else {
                anyhow::bail!("{seen:#}");
            };
            ensure!(conn["bump"] == "scramble" && flows(conn), "{conn:#}");
            ensure!(
                conn["process"]
                    .as_str()
                    .is_some_and(|name| !name.is_empty()),
                "{conn:#}"
            );
            ensure!(
                seen["paths"]
                    .as_array()
                    .is_some_and(|all| all.iter().any(flows)),
                "{seen:#}"
            );
            let bumps = seen["bumps"].as_array().context("bumps")?;
            let on = bumps.iter().find(|bump| bump["name"] == "scramble");
            ensure!(on.is_some_and(flows), "{bumps:#?}");
            talk.finish()
        })
    });
}

#[test]
fn it_draws_obeys_keys_and_leaves_the_terminal_as_it_was() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.bumped()?;
            let printed = on_a_terminal(net)?;
            // The other screen is left, and the cursor is back.
            ensure!(
                printed.contains("\u{1b}[?1049l") && printed.ends_with("\u{1b}[?25h"),
                "{printed:?}"
            );
            talk.finish()
        })
    });
}

/// What it prints on a terminal of 80 columns and 24 lines until the user, who sorts otherwise once, has enough.
fn on_a_terminal(net: &Net) -> Result<String> {
    let program = programs::built("dibsctl");
    let line = format!(
        "stty cols 80 rows 24; exec {} top --interval 0.2",
        program.display()
    );
    let mut command = net.a.host.command("timeout");
    command.args([
        "60",
        "script",
        "--quiet",
        "--return",
        "--flush",
        "--command",
        &line,
        "/dev/null",
    ]);
    let mut terminal = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("script")?;
    let mut keys = terminal.stdin.take().context("stdin")?;
    let mut screen = terminal.stdout.take().context("stdout")?;
    let mut printed = String::new();
    // Of what changes only that is drawn.
    for (shown, key) in [("sorted by rate", "s"), ("scramble", ""), ("[1msent", "q")] {
        let mut piece = [0; 4096];
        while !printed.contains(shown) {
            let len = screen.read(&mut piece).context("the screen")?;
            ensure!(len > 0, "it ended before {shown}: {printed}");
            printed += &String::from_utf8_lossy(&piece[..len]);
        }
        keys.write_all(key.as_bytes()).context("a key")?;
    }
    screen.read_to_string(&mut printed).context("the rest")?;
    let status = terminal.wait().context("its end")?;
    ensure!(status.success(), "{status}: {printed}");
    Ok(printed)
}
