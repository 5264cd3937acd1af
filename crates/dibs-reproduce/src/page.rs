//! The report as one page of HTML that needs nothing else.

use std::fmt::{self, Write as _};

use crate::escaped::escaped;
use crate::finding::{Block, Comparison, Finding, Outcome, Record, Verdict};
use crate::parts::Part;

const STYLE: &str = include_str!("style.css");

/// The page: what came of each part, or that there is nothing of it yet. `about` says where and when.
pub fn page(about: &str, parts: &[(&Part, Option<Record>)]) -> String {
    let mut out = String::new();
    write(&mut out, about, parts).expect("a string takes it");
    out
}

fn write(out: &mut String, about: &str, parts: &[(&Part, Option<Record>)]) -> fmt::Result {
    writeln!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>dibs: the papers on this machine</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
         <h1>The papers on this machine</h1>\n<p>{}</p>",
        escaped(about)
    )?;
    if parts
        .iter()
        .flat_map(|(_, record)| record)
        .any(|record| record.quick)
    {
        out.push_str("<p class=\"note\">Shortened runs (<code>--quick</code>): the figures are less steady than those of whole ones.</p>\n");
    }
    out.push_str(
        "<h2>In short</h2>\n<div class=\"wide\"><table class=\"summary\">\n<thead><tr><th>What</th>\
         <th>The paper</th><th>Here</th><th>Verdict</th></tr></thead>\n<tbody>\n",
    );
    for (part, record) in parts {
        summary(out, part, record.as_ref())?;
    }
    out.push_str("</tbody>\n</table></div>\n");
    for (part, record) in parts {
        section(out, part, record.as_ref())?;
    }
    writeln!(out, "</body>\n</html>")
}

/// Every comparison of a part, as rows of one table.
fn summary(out: &mut String, part: &Part, record: Option<&Record>) -> fmt::Result {
    let (name, title) = (part.name, escaped(part.title));
    writeln!(
        out,
        "<tr class=\"part\"><th colspan=\"4\"><a href=\"#{name}\">{title}</a></th></tr>"
    )?;
    match record.map(|record| &record.outcome) {
        None => writeln!(out, "<tr><td colspan=\"4\">not run yet</td></tr>"),
        Some(Outcome::Failed(reason)) => writeln!(
            out,
            "<tr class=\"failed\"><td colspan=\"4\">failed: {}</td></tr>",
            escaped(reason)
        ),
        Some(Outcome::Done(finding)) => {
            finding.comparisons.iter().try_for_each(|one| row(out, one))
        }
    }
}

fn row(out: &mut String, one: &Comparison) -> fmt::Result {
    let (word, why) = one.verdict.words();
    let class = match one.verdict {
        Verdict::Agrees => "agrees",
        Verdict::Differs(_) => "differs",
        Verdict::Incomparable(_) | Verdict::New => "other",
    };
    let why = why.map(|why| format!("<br><small>{}</small>", escaped(why)));
    let cells = cells("td", [&one.of, &one.paper, &one.ours]);
    writeln!(
        out,
        "<tr>{cells}<td><span class=\"{class}\">{word}</span>{}</td></tr>",
        why.unwrap_or_default()
    )
}

fn section(out: &mut String, part: &Part, record: Option<&Record>) -> fmt::Result {
    let (name, title, source) = (part.name, escaped(part.title), escaped(part.source));
    writeln!(
        out,
        "<section id=\"{name}\">\n<h2>{title}</h2>\n<p class=\"source\">{source}</p>"
    )?;
    match record.map(|record| (&record.outcome, record)) {
        None => writeln!(out, "<p>Not run yet.</p>")?,
        Some((Outcome::Failed(reason), _)) => {
            writeln!(out, "<p class=\"failed\">Failed: {}</p>", escaped(reason))?;
        }
        Some((Outcome::Done(finding), record)) => {
            content(out, finding)?;
            writeln!(
                out,
                "<p class=\"source\">Run at {} in {:.0} s by <code>cargo xtask reproduce --only {name}{}</code>; all figures in \
                 <code>{name}.json</code>.</p>",
                escaped(&record.at),
                record.seconds,
                if record.quick { " --quick" } else { "" },
            )?;
        }
    }
    writeln!(out, "</section>")
}

fn content(out: &mut String, finding: &Finding) -> fmt::Result {
    writeln!(out, "<p>{}</p>", escaped(&finding.setup))?;
    for block in &finding.blocks {
        match block {
            Block::Text { text } => writeln!(out, "<p>{}</p>", escaped(text))?,
            Block::Figure { caption, svg, .. } => {
                let caption = escaped(caption);
                writeln!(
                    out,
                    "<figure>\n{svg}<figcaption>{caption}</figcaption>\n</figure>"
                )?;
            }
            Block::Capture { caption, text } => {
                let (caption, text) = (escaped(caption), escaped(text));
                writeln!(
                    out,
                    "<figure>\n<pre>{text}</pre>\n<figcaption>{caption}</figcaption>\n</figure>"
                )?;
            }
            Block::Table {
                caption,
                columns,
                rows,
            } => {
                let (caption, columns) = (escaped(caption), cells("th", columns));
                let rows = rows
                    .iter()
                    .map(|row| format!("<tr>{}</tr>\n", cells("td", row)));
                writeln!(
                    out,
                    "<div class=\"wide\"><table class=\"figures\">\n<caption>{caption}</caption>\n\
                     <thead><tr>{columns}</tr></thead>\n<tbody>\n{}</tbody>\n</table></div>",
                    rows.collect::<String>()
                )?;
            }
        }
    }
    Ok(())
}

fn cells<'a>(tag: &str, cells: impl IntoIterator<Item = &'a String>) -> String {
    let cells = cells.into_iter();
    let cells = cells.map(|cell| format!("<{tag}>{}</{tag}>", escaped(cell)));
    cells.collect()
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;
    use crate::parts::Stage;

    const PARTS: [Part; 3] = [
        Part {
            name: "good",
            title: "Good <things>",
            source: "A paper",
            run: good,
        },
        Part {
            name: "bad",
            title: "Bad things",
            source: "A paper",
            run: |_| bail!("no \"link\" & no host"),
        },
        Part {
            name: "later",
            title: "Later things",
            source: "A paper",
            run: good,
        },
    ];

    fn good(_: &Stage) -> anyhow::Result<Finding> {
        let mut finding = Finding {
            setup: "Two hosts.".to_owned(),
            ..Finding::default()
        };
        finding.compare("Fig. 1", ["about 90", "91"], Verdict::Agrees);
        let why = Verdict::Differs("another way".to_owned());
        finding.compare("Fig. 2", ["75", "20"], why);
        finding.table(
            "Rates",
            &["bump", "Mbit/s"],
            vec![vec!["seal".to_owned(), "91".to_owned()]],
        );
        finding.figure("one", "A picture", "<svg></svg>\n".to_owned());
        finding.capture("What he sees", "<?0<".to_owned());
        Ok(finding)
    }

    fn record(part: &Part, outcome: Outcome) -> Record {
        Record {
            name: part.name.to_owned(),
            at: "2026-01-01T00:00:00Z".to_owned(),
            seconds: 1.0,
            quick: true,
            outcome,
        }
    }

    #[test]
    fn what_was_done_what_failed_and_what_is_to_come_show() {
        let stage = Stage {
            programs: "/nowhere".into(),
            quick: true,
        };
        let done = match (PARTS[0].run)(&stage) {
            Ok(finding) => Outcome::Done(finding),
            Err(error) => panic!("{error}"),
        };
        let failed = Outcome::Failed("no \"link\" & no host".to_owned());
        let parts = [
            (&PARTS[0], Some(record(&PARTS[0], done))),
            (&PARTS[1], Some(record(&PARTS[1], failed))),
            (&PARTS[2], None),
        ];
        let page = page("Linux 6.1", &parts);
        for part in &PARTS {
            assert_eq!(
                page.matches(&format!("<section id=\"{}\">", part.name))
                    .count(),
                1
            );
            assert!(page.contains(&format!("<a href=\"#{}\">", part.name)));
        }
        for piece in [
            "<h2>Good &lt;things&gt;</h2>",
            "<td>Fig. 1</td><td>about 90</td><td>91</td><td><span class=\"agrees\">agrees</span></td>",
            "<span class=\"differs\">differs</span><br><small>another way</small>",
            "<tr class=\"failed\"><td colspan=\"4\">failed: no &quot;link&quot; &amp; no host</td></tr>",
            "<p class=\"failed\">Failed: no &quot;link&quot;",
            "<td colspan=\"4\">not run yet</td>",
            "<td>seal</td><td>91</td>",
            "<svg></svg>",
            "<pre>&lt;?0&lt;</pre>",
            "--only good --quick</code>",
        ] {
            assert!(page.contains(piece), "{piece}: {page}");
        }
        for outside in ["http://", "https://", "src=", "<script", "<link"] {
            assert!(!page.contains(outside), "{outside}");
        }
    }
}
