//! What the file may say, what it may not, and how it is told.

mod bumps;
mod faults;
mod hosts;
mod rules;
mod values;
mod whole;

use dibs_config::{Config, Error, Invalid, parse};

const KEY: &str = "hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=";
const KEY2: &str = "3p7bfXt9wbTTW2HC7OQ1Nz+DQ8hbeGdNrfx+FG+IK08=";

/// The file of the contract.
fn contract() -> String {
    format!(
        r#"
[daemon]
private_key_file = "/etc/dibs/private.key"
control_socket   = "/run/dibs/dibsd.sock"
port             = 5300
mark_mask        = 0x3f000000
table_base       = 5200
fail             = "closed"
integrity        = "on"
scheduler        = "balanced"
trusted_share    = 0.05
on_trusted_down  = "hold"
default_bump     = "scramble"

[[path]]
name = "eth"
interface = "eth0"
trust = "trusted"

[[path]]
name = "wlan"
interface = "wlan0"
address = "10.0.2.1"
trust = "untrusted"

[[peer]]
name = "server"
public_key = "{KEY}"
preshared_key_file = "/etc/dibs/psk"
addresses = ["10.0.1.2/32"]
[peer.endpoints]
eth  = "10.0.1.2:5300"
wlan = "10.0.2.2:5300"

[[bump]]
name = "vpn"
kind = "device"
device = "tun9"

[[rule]]
bump = "scramble"
protocol = "tcp"
dport = 80
sport = ["1024-65535", 7]
uid = 1000
gid = 100
destination = "10.0.1.0/24"
time = "08:00-18:00"
match = "-m dscp --dscp-class EF"
"#
    )
}

fn good(text: &str) -> Config {
    parse("dibs.toml", text).unwrap_or_else(|error| panic!("{error}"))
}

#[track_caller]
fn fault(text: &str) -> Box<Invalid> {
    match parse("dibs.toml", text) {
        Err(Error::Invalid(invalid)) => invalid,
        other => panic!("was to be refused: {other:?}\n{text}"),
    }
}

/// The contract's file with one piece replaced is refused; returns how, without the file's name.
#[track_caller]
fn refused(piece: &str, replacement: &str) -> String {
    let text = contract();
    assert!(text.contains(piece), "{piece}");
    let message = fault(&text.replacen(piece, replacement, 1)).to_string();
    assert_eq!(message.lines().count(), 1, "one sentence: {message}");
    message.strip_prefix("dibs.toml:").unwrap().to_owned()
}
