//! The manual page.

use std::process::Command;

#[test]
fn it_tells_of_the_options() {
    let directory = tempfile::tempdir().unwrap();
    let made = Command::new(env!("CARGO_BIN_EXE_dibsd"))
        .arg("--man")
        .arg(directory.path())
        .output();
    assert!(made.unwrap().status.success());
    let page = std::fs::read_to_string(directory.path().join("dibsd.8")).unwrap();
    for part in [
        ".TH dibsd 8",
        ".SH EXAMPLES\n",
        ".SH FILES",
        ".SH \"EXIT STATUS\"",
        "dibsd.toml(5)",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    for option in ["config", "guard"] {
        assert!(page.contains(&format!("\\-\\-{option}")), "{page}");
    }
    assert!(
        !page.contains("man\\fR"),
        "it is only for who packs it: {page}"
    );

    let nowhere = Command::new(env!("CARGO_BIN_EXE_dibsd"))
        .args(["--man", "/nonexistent"])
        .output()
        .unwrap();
    let said = String::from_utf8(nowhere.stderr).unwrap();
    assert!(!nowhere.status.success() && said.contains("cannot write the manual to /nonexistent"));
}
