//! The shipped examples are right, and show what they claim to show.

use std::path::PathBuf;

use dibs_config::{Config, load, parse};

fn configs() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../configs")
}

fn example(name: &str) -> Config {
    load(&configs().join(name)).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn each_example_is_right_and_carried() {
    let mut seen = 0;
    for entry in std::fs::read_dir(configs()).unwrap() {
        let path = entry.unwrap().path();
        if path
            .extension()
            .is_some_and(|extension| extension == "toml")
        {
            let config = load(&path).unwrap_or_else(|error| panic!("{error}"));
            config
                .check_carried()
                .unwrap_or_else(|error| panic!("{error}"));
            seen += 1;
        }
    }
    assert!(seen >= 3, "examples are missing: {seen}");
}

/// Uncommented, the lines that show a key are right, and those of [daemon] change nothing.
#[test]
fn commented_keys_are_right_and_show_the_defaults() {
    let text = std::fs::read_to_string(configs().join("host-a.toml")).unwrap();
    let uncommented: String = text
        .lines()
        .map(|line| match line.strip_prefix('#') {
            Some(key) if key.starts_with(|c: char| c.is_lowercase() || c == '[') => key,
            _ => line,
        })
        .flat_map(|line| [line, "\n"])
        .collect();
    let (section, _) = uncommented.split_once("[[path]]").unwrap();
    let assignments = section.lines().filter(|line| line.contains(" = ")).count();
    assert_eq!(assignments, 19, "each key of [daemon] is shown:\n{section}");

    let (shown, shipped) = (
        parse("shown", &uncommented).unwrap(),
        example("host-a.toml"),
    );
    // There is no network that each host is behind, and nothing listens for Prometheus unless told.
    let daemon = dibs_config::Daemon {
        gateway: shipped.daemon.gateway.clone(),
        metrics: shipped.daemon.metrics,
        ..shown.daemon.clone()
    };
    assert_eq!(daemon, shipped.daemon);
    assert_eq!(shown.daemon.gateway.len(), 2);
    assert!(shown.daemon.metrics.is_some());
    assert_eq!(shown.rules.len(), shipped.rules.len() + 4);
    // Whoever starts with the example as it is has nothing that can be read.
    assert!(shipped.rules.iter().all(|rule| rule.bump == "seal"));
    assert_eq!(shipped.warnings(), Vec::<String>::new());
    assert!(shown.bump("vpn").unwrap().device().is_some());
    assert_eq!(shown.paths[0], shipped.paths[0]);
    let wlan = shown.paths[1].usage;
    assert!(wlan.rate.is_some() && wlan.volume.is_some());
    assert!(shown.prefer.is_some_and(|prefer| prefer.path == "wlan"));
    assert!(shown.peers[0].preshared_key_file.is_some());
}

#[test]
fn the_two_hosts_belong_together() {
    let (a, b) = (example("host-a.toml"), example("host-b.toml"));
    assert_eq!(a.daemon.port, b.daemon.port);
    let eth = |config: &Config| config.peers[0].endpoints[0].1.address().unwrap();
    assert!(
        a.peers[0]
            .addresses
            .iter()
            .any(|net| net.contains(&eth(&a).ip()))
    );
    assert!(
        b.peers[0]
            .addresses
            .iter()
            .any(|net| net.contains(&eth(&b).ip()))
    );
    assert_ne!(a.peers[0].public_key, b.peers[0].public_key);
}
