//! What dibsctl set against what the file says.

use super::*;

fn config(more: &str, wlan: &str) -> Config {
    let text = format!(
        "[daemon]\n{more}\n\
         [[path]]\nname = \"eth\"\ninterface = \"eth0\"\ntrust = \"trusted\"\n\
         [[path]]\nname = \"wlan\"\ninterface = \"wlan0\"\ntrust = \"untrusted\"\n{wlan}\n"
    );
    dibs_config::parse("dibsd.toml", &text).unwrap()
}

fn role(path: &str, role: &str) -> PathChange {
    PathChange::Role {
        path: path.to_owned(),
        role: role.to_owned(),
    }
}

fn prefer(path: &str, delta: Option<f64>) -> PathChange {
    PathChange::Prefer {
        path: path.to_owned(),
        weight: None,
        delta,
    }
}

fn limits(rate: Option<Limit>, volume: Option<Limit>) -> PathChange {
    PathChange::Limit {
        path: "wlan".to_owned(),
        rate,
        volume,
    }
}

fn scheduler(name: &str) -> PathChange {
    PathChange::Scheduler {
        name: name.to_owned(),
    }
}

/// What dibsctl set stands above the file, each thing by itself, and comes back as it was saved.
#[test]
fn wishes_stand_above_the_file() {
    let file = config(
        "scheduler = \"blest\"",
        "role = \"backup\"\nrate = \"20 Mbit\"\nvolume = \"10 GB\"\n[prefer]\npath = \"wlan\"",
    );
    let mut wishes = Wishes::default();
    let of_file = wishes.in_force(&file);
    assert_eq!(of_file.scheduler, Scheduler::Blest);
    assert_eq!(of_file.paths[1], file.paths[1].usage);
    assert_eq!(of_file.prefer, file.prefer);

    for change in [
        role("wlan", "secondary"),
        limits(Some(Limit::None), None),
        scheduler("redundant"),
        prefer("eth", Some(1.5)),
    ] {
        wishes.take(&file, change).unwrap();
    }
    let text = serde_json::to_string(&wishes).unwrap();
    assert_eq!(serde_json::from_str::<Wishes>(&text).unwrap(), wishes);
    assert_eq!(wishes.clone().fitting(&file), (wishes.clone(), Vec::new()));
    let now = wishes.in_force(&file);
    assert_eq!(now.scheduler, Scheduler::Redundant);
    let wlan = now.paths[1];
    assert_eq!((wlan.role, wlan.rate), (Role::Secondary, None));
    assert_eq!(
        wlan.volume, file.paths[1].usage.volume,
        "nobody changed that"
    );
    let prefer = now.prefer.unwrap();
    assert_eq!(
        (prefer.path.as_str(), prefer.weight, prefer.delta),
        ("eth", 100, 1.5)
    );

    wishes.take(&file, PathChange::Unprefer).unwrap();
    assert_eq!(
        wishes.in_force(&file).prefer,
        None,
        "although the file has one"
    );
    wishes.take(&file, PathChange::Reset).unwrap();
    assert_eq!(
        (wishes.in_force(&file), wishes),
        (of_file, Wishes::default())
    );
}

#[test]
fn what_cannot_be_is_refused() {
    let file = config("", "");
    let mut wishes = Wishes::default();
    for change in [
        role("wlna", "never"),
        role("wlan", "spare"),
        prefer("wlna", None),
        prefer("wlan", Some(0.5)),
        scheduler("fastest"),
        limits(Some(Limit::At(1)), None),
        limits(None, Some(Limit::At(u64::MAX))),
    ] {
        let refused = wishes.take(&file, change.clone());
        assert!(refused.is_err(), "{change:?}");
    }
    assert_eq!(wishes.in_force(&file), Wishes::default().in_force(&file));
    for path in ["wlan", "eth"] {
        assert_eq!(wishes.in_force(&file).fault(), None);
        wishes.take(&file, role(path, "never")).unwrap();
    }
    assert!(wishes.in_force(&file).fault().is_some(), "nothing is left");
}

/// A path that the file lost, or something of a later daemon, keeps no daemon from starting.
#[test]
fn what_does_not_fit_any_more_is_dropped() {
    let file = config("", "");
    let text = r#"{"scheduler":"fastest","prefer":{"path":{"path":"lte","weight":1,"delta":2000}},
        "paths":{"lte":{"role":"backup"},"wlan":{"role":"spare","rate":{"at":1},"volume":"none"}}}"#;
    let saved: Wishes = serde_json::from_str(text).unwrap();
    let (fitting, whys) = saved.fitting(&file);
    assert_eq!(whys.len(), 4, "{whys:?}");
    assert_eq!(fitting.in_force(&file), Wishes::default().in_force(&file));
}
