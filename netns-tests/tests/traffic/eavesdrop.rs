//! What `dibsctl eavesdrop` hears on a path under real traffic.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

use anyhow::{Context as _, Result, ensure};
use netns_tests::daemon::SOON;
use netns_tests::topology::server;
use netns_tests::{Net, Setup, isolated};
use serde_json::Value;

/// None of what the attack's statistics are made of.
const TEXT: &[u8] = include_bytes!("../../../crates/dibs-eavesdrop/tests/texts/english.txt");
const SENTENCE: &str = "Nobody on the jetty was surprised";

/// What is heard on the untrusted path while `b` sends the text to `a` again and again.
fn heard(net: &Net, port: u16) -> Result<Value> {
    heard_of(net, port, false)
}

/// The same, of all or only of what can be of this connection.
fn heard_of(net: &Net, port: u16, only_this: bool) -> Result<Value> {
    let listener = net.b.host.in_ns(|| TcpListener::bind(("0.0.0.0", port)));
    let listener = listener.context("listen")?;
    let sender = net.b.host.thread("sender", move || -> Result<()> {
        let (mut stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        // Until the reader has gone.
        let mut word = [0; 1];
        while stream.read(&mut word)? == 1 {
            stream.write_all(TEXT)?;
        }
        Ok(())
    })?;
    let stream = net.a.host.in_ns(|| TcpStream::connect(server(port)));
    let mut stream = stream.context("connect")?;
    stream.set_read_timeout(Some(SOON))?;
    let near = stream.local_addr()?;
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let reader = net.a.host.thread("reader", move || -> Result<()> {
        let mut text = vec![0; TEXT.len()];
        while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
            stream.write_all(b".")?;
            stream.read_exact(&mut text)?;
            ensure!(text == TEXT, "the text is another one");
            // Nothing is waited for: who asks without a pause gives the eavesdropper more than he looks at.
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        Ok(())
    })?;
    let listen = ["eavesdrop", "--path", "wlan", "--seconds", "2"];
    let report = match only_this {
        true => net.a.ctl(&["conn", "list"]).and_then(|conns| {
            let mut conns = conns.as_array().into_iter().flatten();
            let conn = conns.find(|conn| conn["local"] == near.to_string());
            let id = conn.context("the connection is listed")?["id"].to_string();
            net.a.ctl(&[&listen[..], &["--conn", &id]].concat())
        }),
        false => net.a.ctl(&listen),
    };
    drop(stop);
    for thread in [reader, sender] {
        thread.join().expect("it does not panic")?;
    }
    report
}

/// Bytes of text recovered of all directions, datagrams in them, and the text.
fn recovered(report: &Value) -> (u64, u64, String) {
    let directions = report["directions"].as_array().cloned().unwrap_or_default();
    let sum = |key: &str| {
        let all = directions.iter().filter_map(|way| way[key].as_u64());
        all.sum()
    };
    let pieces = directions.iter().filter_map(|way| way["pieces"].as_array());
    let texts = pieces.flatten().filter_map(|piece| piece["text"].as_str());
    (sum("recovered"), sum("datagrams"), texts.collect())
}

#[test]
fn scrambled_text_is_read_on_the_untrusted_path_and_sealed_text_is_not() {
    isolated(|| {
        let rules = "bump = \"scramble\"\ndport = 7000\n[[rule]]\nbump = \"seal\"\ndport = 7001";
        Setup::new().rule(rules).run(|net| {
            // What little there is would all go by the other path.
            net.b.ctl(&["path", "prefer", "wlan", "--delta", "100"])?;
            let (bytes, datagrams, text) = recovered(&heard(net, 7000)?);
            ensure!(
                bytes > 4 * TEXT.len() as u64,
                "{bytes} bytes of {datagrams} datagrams"
            );
            ensure!(text.contains(SENTENCE), "{text}");
            let sealed = recovered(&heard(net, 7001)?);
            ensure!(sealed.0 == 0 && sealed.1 > 100, "{sealed:?}");
            Ok(())
        })
    });
}

#[test]
fn of_one_connection_only_its_peers_datagrams_and_its_own_segments_count() {
    isolated(|| {
        Setup::new()
            .rule("bump = \"scramble\"\ndport = 7000")
            .run(|net| {
                net.b.ctl(&["path", "prefer", "wlan", "--delta", "100"])?;
                let report = heard_of(net, 7000, true)?;
                let (bytes, _, text) = recovered(&report);
                ensure!(bytes > TEXT.len() as u64 && text.contains(SENTENCE));
                let of = &report["connection"];
                let bytes = ["bytes_by_path", "bytes"].map(|key| of[key].as_u64().unwrap_or(0));
                ensure!(of["bump"] == "scramble", "{of}");
                ensure!(
                    bytes[1] > TEXT.len() as u64 && bytes[0] <= bytes[1] && bytes[0] > 0,
                    "{of}"
                );
                let plain = heard_of(net, 7001, true)?;
                ensure!(plain["connection"]["bump"] == "plain", "{plain}");
                let said = net
                    .a
                    .refused(&["eavesdrop", "--path", "wlan", "--conn", "9999999"])?;
                ensure!(said.contains("no connection 9999999"), "{said}");
                Ok(())
            })
    });
}

#[test]
fn a_path_that_is_not_there_is_named() {
    isolated(|| {
        Setup::new().run(|net| {
            let said = net.a.refused(&["eavesdrop", "--path", "lte"])?;
            ensure!(
                said.contains("no path lte: choose one of eth, wlan"),
                "{said}"
            );
            Ok(())
        })
    });
}
