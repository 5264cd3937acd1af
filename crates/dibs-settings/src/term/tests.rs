use super::*;

#[test]
fn day_spans_may_cross_midnight() {
    let day = day_span("08:00-18:00").unwrap();
    assert!(day.contains(8 * 60) && day.contains(17 * 60 + 59));
    assert!(!day.contains(7 * 60 + 59) && !day.contains(18 * 60));
    let night = day_span("22:30-06:00").unwrap();
    assert!(night.contains(23 * 60) && night.contains(0) && !night.contains(12 * 60));
    assert_eq!(night.to_string(), "22:30-06:00");
    for bad in [
        "08:00",
        "8:00-18:00",
        "08:00-24:00",
        "08:60-09:00",
        "+8:00-09:00",
        "1:1-2:2",
    ] {
        assert!(day_span(bad).is_err(), "{bad}");
    }
    assert!(day_span("08:00-08:00").is_err());
}

#[test]
fn code_points() {
    for (text, number) in [
        ("EF", 46),
        ("CS0", 0),
        ("CS7", 56),
        ("AF11", 10),
        ("AF43", 38),
        ("LE", 1),
        ("63", 63),
    ] {
        assert_eq!(dscp(text).unwrap(), number, "{text}");
    }
    for bad in ["", "64", "CS8", "AF14", "AF50", "ef", "-1", "EF\n"] {
        assert!(dscp(bad).is_err(), "{bad:?}");
    }
}

#[test]
fn port_ranges() {
    assert_eq!(
        port_range("80").unwrap(),
        PortRange {
            first: 80,
            last: 80
        }
    );
    assert_eq!(port_range("8000-8010").unwrap().to_string(), "8000-8010");
    for bad in ["0", "", "-", "9-8", "1-65536", "http", "1 - 2"] {
        assert!(port_range(bad).is_err(), "{bad}");
    }
}

#[test]
fn prefixes() {
    assert_eq!(prefix("10.0.1.2").unwrap().to_string(), "10.0.1.2/32");
    assert_eq!(prefix("fd00::/64").unwrap().to_string(), "fd00::/64");
    assert!(
        prefix("10.0.1.2/24")
            .unwrap_err()
            .hint
            .unwrap()
            .contains("10.0.1.0/24")
    );
    for bad in ["10.0.1/24", "10.0.1.2/33", "host", "fd00::/129", ""] {
        assert!(prefix(bad).is_err(), "{bad}");
    }
    assert!(steered_prefix("0.0.0.0/0").is_ok());
    assert!(steered_prefix("127.0.0.0/8").is_err() && steered_prefix("ff02::/16").is_err());
}

#[test]
fn a_pattern_stands_for_names() {
    for (pattern, name, is) in [
        ("wwan*", "wwan0", true),
        ("wwan*", "wwan", true),
        ("wwan*", "wlan0", false),
        ("*", "", true),
        ("en?usb*", "enxusb7", true),
        ("en?usb*", "enusb7", false),
        ("*0", "eth0.0", true),
        ("eth0", "eth0", true),
        ("eth0", "eth01", false),
        ("*a*b", "xaab", true),
        ("*a*b", "xaabc", false),
        ("w**", "w", true),
    ] {
        assert_eq!(is_like(pattern, name), is, "{pattern} {name}");
    }
    assert!(interfaces("wwan*").is_ok() && interfaces("02:15:e0:ec:01:00").is_ok());
    for wrong in ["", "-w*", "w *", "w*\nx", "*;"] {
        assert!(interfaces(wrong).is_err(), "{wrong}");
    }
}
