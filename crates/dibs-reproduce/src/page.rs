//! The report as one page of HTML that needs nothing else.

use std::fmt::Write as _;

use crate::finding::{Block, Comparison, Finding, Outcome, Record, Verdict};
use crate::parts::Part;

const STYLE: &str = include_str!("style.css");
const INFALLIBLE: &str = "a string takes it";

/// The page: what came of each part, or that there is nothing of it yet. `about` says where and when.
pub fn page(about: &str, parts: &[(&Part, Option<Record>)]) -> String {
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>dibs: the papers on this machine</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
         <h1>The papers on this machine</h1>\n<p>{}</p>\n",
        escaped(about)
    );
    if parts
        .iter()
        .flat_map(|(_, record)| record)
        .any(|record| record.quick)
    {
        out += "<p class=\"note\">Shortened runs (<code>--quick</code>): the figures are less steady than those of whole ones.</p>\n";
    }
    summary(&mut out, parts);
    for (part, record) in parts {
        section(&mut out, part, record.as_ref());
    }
    out + "</body>\n</html>\n"
}

/// Every comparison in one table.
fn summary(out: &mut String, parts: &[(&Part, Option<Record>)]) {
    *out += "<h2>In short</h2>\n<div class=\"wide\"><table class=\"summary\">\n<thead><tr><th>What</th>\
             <th>The paper</th><th>Here</th><th>Verdict</th></tr></thead>\n<tbody>\n";
    for (part, record) in parts {
        let head = format!(
            "<tr class=\"part\"><th colspan=\"4\"><a href=\"#{0}\">{1}</a></th></tr>\n",
            part.name,
            escaped(part.title)
        );
        *out += &head;
        match record.as_ref().map(|record| &record.outcome) {
            None => *out += "<tr><td colspan=\"4\">not run yet</td></tr>\n",
            Some(Outcome::Failed(reason)) => {
                let reason = escaped(reason);
                writeln!(
                    out,
                    "<tr class=\"failed\"><td colspan=\"4\">failed: {reason}</td></tr>"
                )
                .expect(INFALLIBLE);
            }
            Some(Outcome::Done(finding)) => {
                finding.comparisons.iter().for_each(|one| row(out, one));
            }
        }
    }
    *out += "</tbody>\n</table></div>\n";
}

fn row(out: &mut String, one: &Comparison) {
    let (word, why) = one.verdict.words();
    let class = match one.verdict {
        Verdict::Agrees => "agrees",
        Verdict::Differs(_) => "differs",
        Verdict::Incomparable(_) | Verdict::New => "other",
    };
    let why = why.map(|why| format!("<br><small>{}</small>", escaped(why)));
    writeln!(
        out,
        "<tr><td>{}</td><td>{}</td><td>{}</td><td><span class=\"{class}\">{word}</span>{}</td></tr>",
        escaped(&one.of),
        escaped(&one.paper),
        escaped(&one.ours),
        why.unwrap_or_default()
    )
    .expect(INFALLIBLE);
}

fn section(out: &mut String, part: &Part, record: Option<&Record>) {
    writeln!(
        out,
        "<section id=\"{}\">\n<h2>{}</h2>\n<p class=\"source\">{}</p>",
        part.name,
        escaped(part.title),
        escaped(part.source)
    )
    .expect(INFALLIBLE);
    match record.map(|record| (&record.outcome, record)) {
        None => *out += "<p>Not run yet.</p>\n",
        Some((Outcome::Failed(reason), _)) => {
            writeln!(out, "<p class=\"failed\">Failed: {}</p>", escaped(reason)).expect(INFALLIBLE);
        }
        Some((Outcome::Done(finding), record)) => {
            content(out, finding);
            writeln!(
                out,
                "<p class=\"source\">Run at {} in {:.0} s by <code>cargo xtask reproduce --only {}{}</code>; all figures in \
                 <code>{}.json</code>.</p>",
                escaped(&record.at),
                record.seconds,
                part.name,
                if record.quick { " --quick" } else { "" },
                part.name
            )
            .expect(INFALLIBLE);
        }
    }
    *out += "</section>\n";
}

fn content(out: &mut String, finding: &Finding) {
    writeln!(out, "<p>{}</p>", escaped(&finding.setup)).expect(INFALLIBLE);
    for block in &finding.blocks {
        match block {
            Block::Text { text } => writeln!(out, "<p>{}</p>", escaped(text)),
            Block::Figure { caption, svg, .. } => writeln!(
                out,
                "<figure>\n{svg}<figcaption>{}</figcaption>\n</figure>",
                escaped(caption)
            ),
            Block::Capture { caption, text } => writeln!(
                out,
                "<figure>\n<pre>{}</pre>\n<figcaption>{}</figcaption>\n</figure>",
                escaped(text),
                escaped(caption)
            ),
            Block::Table {
                caption,
                columns,
                rows,
            } => {
                table(out, caption, columns, rows);
                Ok(())
            }
        }
        .expect(INFALLIBLE);
    }
}

fn table(out: &mut String, caption: &str, columns: &[String], rows: &[Vec<String>]) {
    let cells = |tag: &str, cells: &[String]| {
        let cells = cells
            .iter()
            .map(|cell| format!("<{tag}>{}</{tag}>", escaped(cell)));
        cells.collect::<String>()
    };
    writeln!(
        out,
        "<div class=\"wide\"><table class=\"figures\">\n<caption>{}</caption>\n<thead><tr>{}</tr></thead>\n<tbody>",
        escaped(caption),
        cells("th", columns)
    )
    .expect(INFALLIBLE);
    for row in rows {
        writeln!(out, "<tr>{}</tr>", cells("td", row)).expect(INFALLIBLE);
    }
    *out += "</tbody>\n</table></div>\n";
}

fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            other => out.push(other),
        }
    }
    out
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
