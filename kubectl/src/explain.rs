//! `kubectl krypton explain tenant NAME`: explains the state of a Tenant on the home cluster and each member, and the
//! next step.

mod remedy;
mod sources;
mod story;

use std::fmt::Write as _;

use clap::{Args, ValueEnum};
use jiff::Timestamp;
use krypton_types::names::namespace_name;
use krypton_types::tenant::TenantKey;
use serde_json::{Value, json};

use crate::error::KubectlError;
use crate::home::{Connection, HomeArgs};
use crate::render::{Output, Printed, encoded, one_line};

use story::{Line, Mark, Story};

#[derive(Clone, Debug, Args)]
pub(super) struct Explain {
    #[arg(value_name = "KIND")]
    kind: Explained,
    /// Name of the Tenant.
    name: String,
    /// Namespace of the Tenant; by default that of the context.
    #[arg(short, long, value_name = "NAMESPACE", value_parser = namespace_name)]
    namespace: Option<String>,
    /// Tell of this member of the fleet alone.
    #[arg(long, value_name = "MEMBER")]
    on: Option<String>,
    /// Namespace of the hub; by default krypton-system, else krypton, else that of the context.
    #[arg(long, value_name = "NAMESPACE", value_parser = namespace_name)]
    hub_namespace: Option<String>,
    /// For programs.
    #[arg(short, long, value_name = "FORMAT")]
    output: Option<Format>,
    #[command(flatten)]
    pub(super) home: HomeArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Explained {
    #[value(aliases = ["tenants", "tn"])]
    Tenant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    Json,
}

/// Missing information becomes a line of the output instead of an error.
pub(super) async fn run(
    args: Explain,
    home: &Connection,
    now: Timestamp,
) -> Result<Printed, KubectlError> {
    let Explained::Tenant = args.kind;
    let namespace = args.namespace.unwrap_or_else(|| home.namespace.clone());
    let key = TenantKey {
        namespace,
        name: args.name,
    };
    let asked = sources::Asked {
        on: args.on.as_deref(),
        hub_namespace: args.hub_namespace.as_deref(),
    };
    let sources = Box::pin(sources::gather(&key, asked, home)).await?;
    let story = story::story(&key, args.on.as_deref(), &sources, now);
    let stdout = match args.output {
        Some(Format::Json) => encoded(Output::Json, &as_json(&key, &story))?,
        None => text(&story),
    };
    let printed = Printed {
        stdout,
        stderr: String::new(),
    };
    match story.ready {
        true => Ok(printed),
        false => Err(KubectlError::NotReady { printed }),
    }
}

/// Formats one line per statement, grouped by member.
fn text(story: &Story) -> String {
    let mut text = String::new();
    let mut member = None;
    for line in &story.lines {
        if line.member != member {
            member.clone_from(&line.member);
            if let Some(member) = &member {
                writeln!(text, "{}", one_line(member)).expect("a String takes every write");
            }
        }
        let indent = if member.is_some() { "  " } else { "" };
        let (mark, said) = (sign(line.mark), one_line(&line.text));
        writeln!(text, "{indent}{mark} {said}").expect("a String takes every write");
        if let Some(remedy) = &line.remedy {
            writeln!(text, "{indent}    → {}", one_line(remedy))
                .expect("a String takes every write");
        }
    }
    text
}

fn sign(mark: Mark) -> char {
    match mark {
        Mark::Well => '✓',
        Mark::Note => '!',
        Mark::Wrong => '✗',
        Mark::NotKnown => '?',
    }
}

fn as_json(key: &TenantKey, story: &Story) -> Value {
    let line = |line: &Line| {
        json!({
            "mark": match line.mark {
                Mark::Well => "Well",
                Mark::Note => "Note",
                Mark::Wrong => "Wrong",
                Mark::NotKnown => "NotKnown",
            },
            "member": line.member,
            "text": one_line(&line.text),
            "remedy": line.remedy.as_deref().map(one_line),
        })
    };
    json!({
        "namespace": key.namespace,
        "name": key.name,
        "ready": story.ready,
        "lines": story.lines.iter().map(line).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests;
