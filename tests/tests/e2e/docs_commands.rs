//! Shows that each command in the documentation works. A test runs the command unchanged, or the list names the test
//! that runs a similar one.

mod manifest;
pub(crate) mod pages;
mod story;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    sync::Arc,
    time::Duration,
};

use clap::{CommandFactory, Parser};
use krypton_kubectl::Cli;
use krypton_tests::{
    Agent, AgentOptions, Cluster, Hub, HubOptions, OwnChart, Parts, TestResult, Tools,
    assert_contains,
    fleet::{CONNECTED, FleetClient},
    kubectl_krypton,
    membership::{bundle_in_namespace, kubectl_krypton_path, write_secret},
    port::Port,
    process::Invocation,
};

use crate::docs::tests_of;
use manifest::{Entry, entries};
use pages::{Command, commands, commands_in, is_mention, pages, read, root, words};
use story::Story;

const DEADLINE: Duration = Duration::from_secs(60);
const DEMO_DEADLINE: Duration = Duration::from_secs(400);
/// Parts of the story that the list of commands can name. The tests below play each of them.
const PARTS: [&str; 9] = [
    "look",
    "members",
    "verbs",
    "runbook",
    "people",
    "hub",
    "leave",
    "upgrade",
    "uninstall",
];
/// Names of blocks, in the same way.
const BLOCKS: [&str; 7] = [
    "install",
    "quickstart",
    "upgrade-chart",
    "by-kubeconfig",
    "migrate",
    "examples",
    "without-pods",
];

async fn all_commands() -> Vec<Command> {
    let commands_of_pages = pages().into_iter().map(|page| commands(&page));
    let commands_of_pages: Result<Vec<_>, _> = commands_of_pages.collect();
    let mut all = commands_of_pages.unwrap().concat();
    all.extend(chart_notes().await.unwrap());
    all
}

/// Returns the commands in the notes that the charts print after an installation.
async fn chart_notes() -> TestResult<Vec<Command>> {
    let mut all = Vec::new();
    for (chart, values) in [
        (
            OwnChart::Hub,
            "chart.repo=https://charts.example.org,chart.name=small",
        ),
        (OwnChart::Hub, "installMode.crdsRbacOnly=true"),
        (OwnChart::Agent, "replicaCount=2"),
    ] {
        let folder = chart.folder();
        let folder = folder.to_str().unwrap();
        let options = ["--dry-run=client", "-n", chart.namespace(), "--set", values];
        let args = ["install", chart.name(), folder].into_iter().chain(options);
        let output = tool_output("helm", &args.collect::<Vec<_>>()).await?;
        let (_, notes) = output.split_once("\nNOTES:\n").unwrap();
        // Commands are indented, or follow a colon in a sentence.
        let notes = notes.replace(": kubectl", ":\n  kubectl");
        let lines: Vec<&str> = notes
            .lines()
            .filter(|line| line.starts_with("  "))
            .collect();
        let page = format!("the notes of {}", chart.name());
        all.extend(commands_in(&page, &lines.join("\n")));
    }
    assert!(all.len() > 8, "{all:?}");
    Ok(all)
}

/// Returns the output of a tool that runs without a cluster.
async fn tool_output(tool: &str, args: &[&str]) -> Result<String, String> {
    let command = Invocation::new(Tools::find().unwrap().binary(tool))
        .args(args.iter().copied())
        .env("KUBECONFIG", "/nonexistent");
    let output = command.output(DEADLINE).await;
    output.map_err(|error| format!("{error:#}"))
}

#[tokio::test]
async fn each_documented_command_is_run_by_test() {
    let (all, entries) = (all_commands().await, entries());
    let documented: BTreeSet<&str> = all.iter().map(|command| command.text.as_str()).collect();
    let run_commands: BTreeSet<&str> = entries.iter().map(|entry| entry.command.as_str()).collect();
    let mut problems: Vec<String> = Vec::new();
    for command in &all {
        let (text, page) = (&command.text, &command.page);
        match &command.run {
            Some(run) if !BLOCKS.contains(&run.as_str()) => {
                problems.push(format!("{page}: no {run}"))
            }
            None if !run_commands.contains(text.as_str()) && !is_named_only(text) => {
                problems.push(format!("{page}: nobody runs: {text}"));
            }
            _ => {}
        }
    }
    for entry in &entries {
        if !documented.contains(entry.command.as_str()) {
            problems.push(format!("no page has: {}", entry.command));
        }
        problems.extend(
            reference_error(entry)
                .await
                .map(|reason| format!("{}: {reason}", entry.command)),
        );
    }
    assert!(problems.is_empty(), "{problems:#?}");
    assert!(documented.len() > 80, "{}", documented.len());
}

/// A complete krypton command isn't just a mention, because the user can run it without more arguments.
fn is_named_only(text: &str) -> bool {
    let complete = words(text).is_ok_and(|words| {
        let ours = words.iter().skip(1);
        words.len() > 2 && Cli::try_parse_from(ours).is_ok()
    });
    is_mention(text) && !complete
}

/// Returns the commands that make would run.
async fn make_dry_run(command: &str) -> String {
    let dry = format!(
        "cd '{}' && {}",
        root().display(),
        command.replacen("make", "make --dry-run", 1)
    );
    let path = std::env::var_os("PATH").unwrap_or_default();
    let bash = Invocation::new("bash").args(["-c", &dry]).env("PATH", path);
    bash.output(DEADLINE).await.unwrap()
}

/// Returns the error in an entry's reference to the test or script that runs the command.
async fn reference_error(entry: &Entry) -> Option<String> {
    if let Some(run) = &entry.run {
        let only_in_run = entry.test.is_none() && entry.script.is_none();
        let known = only_in_run && PARTS.contains(&run.as_str());
        return (!known).then(|| format!("there is no part {run}"));
    }
    if entry.why.as_ref().is_none_or(|reason| reason.len() < 10) {
        return Some("the reason why it does not run here is missing".to_owned());
    }
    if let Some(script) = &entry.script {
        let text = match script.file.as_str() {
            "Makefile" => make_dry_run(&entry.command).await,
            file => fs::read_to_string(root().join(file)).unwrap_or_default(),
        };
        return (!text.contains(&script.holds)).then(|| format!("{} does not", script.file));
    }
    let Some((module, name)) = entry
        .test
        .as_deref()
        .and_then(|test| test.rsplit_once("::"))
    else {
        return Some("nobody runs it".to_owned());
    };
    let module = module.rsplit("::").next().unwrap_or(module);
    let file = root().join(format!("tests/tests/e2e/{module}.rs"));
    let exists = fs::read_to_string(file).is_ok_and(|text| tests_of(&text).contains(name));
    (!exists).then(|| format!("there is no test {module}::{name}"))
}

#[tokio::test]
async fn documented_commands_are_accepted_by_their_programs() -> TestResult {
    let mut problems: Vec<String> = Vec::new();
    let mut command_counts: BTreeMap<String, usize> = BTreeMap::new();
    for Command { page, text, .. } in all_commands().await {
        let mut words = words(&text)?;
        let program = words.remove(0);
        let outcome = match program.as_str() {
            "kubectl" if words.first().is_some_and(|verb| verb == "krypton") => {
                check_krypton(&words)
            }
            "kubectl" | "helm" => check_flags(&program, &words).await,
            "make" => check_make_target(&words).await,
            "krypton-hub" => check_known_flags(&words, &krypton_hub::args::command()),
            "krypton-agent" => check_known_flags(&words, &krypton_agent::args::Flags::command()),
            _ => Ok(()),
        };
        *command_counts.entry(program).or_default() += 1;
        problems.extend(
            outcome
                .err()
                .map(|problem| format!("{page}: {text}: {problem}")),
        );
    }
    assert!(problems.is_empty(), "{problems:#?}");
    for program in ["kubectl", "helm", "make", "krypton-hub", "krypton-agent"] {
        assert!(command_counts.contains_key(program), "{command_counts:?}");
    }
    Ok(())
}

fn check_krypton(words: &[String]) -> Result<(), String> {
    let krypton = Cli::command();
    if let [_, verb, ..] = words
        && !krypton
            .get_subcommands()
            .any(|known| known.get_name() == verb)
    {
        return Err(format!("there is no {verb}"));
    }
    // A word in capitals is a placeholder.
    let example = words.iter().map(|word| {
        let is_placeholder = word.chars().all(|letter| letter.is_ascii_uppercase());
        match is_placeholder {
            true => word.to_lowercase(),
            false => word.clone(),
        }
    });
    match Cli::try_parse_from(example) {
        Err(error) if words.len() > 2 => Err(error.to_string()),
        _ => Ok(()),
    }
}

/// Verifies that the help of this verb contains each flag.
async fn check_flags(program: &str, words: &[String]) -> Result<(), String> {
    let ours = || words.iter().take_while(|word| *word != "--");
    let is_flag = |word: &&String| word.len() > 1 && word.starts_with('-');
    let flag = |word: &String| word.split('=').next().unwrap_or_default().to_owned();
    let flags: Vec<String> = ours().filter(is_flag).map(flag).collect();
    // A namespace can precede the verb.
    let verb = ours().scan(false, |value, word| {
        let is_value = std::mem::replace(value, word == "-n");
        Some((!is_value && !word.starts_with('-')).then_some(word.as_str()))
    });
    let verb: Vec<&str> = verb.flatten().take(3).collect();
    let Some(first) = verb.first() else {
        return Ok(());
    };
    // Try the longest known sequence of words first, because the names of objects aren't part of the help.
    let mut help = Err(format!("there is no {first}"));
    for length in (1..=verb.len()).rev() {
        let row = verb.iter().take(length).copied();
        let row: Vec<&str> = row.chain(["--help"]).collect();
        if let Ok(known) = tool_output(program, &row).await {
            help = Ok(known);
            break;
        }
    }
    let mut help = help?;
    if program == "kubectl" {
        help += &tool_output(program, &["options"]).await?;
    }
    let is_separator = |letter: char| !(letter.is_ascii_alphanumeric() || letter == '-');
    let known: BTreeSet<&str> = help.split(is_separator).collect();
    let unknown: Vec<String> = flags
        .into_iter()
        .filter(|flag| !known.contains(flag.as_str()))
        .collect();
    match unknown.is_empty() && help.contains(first) {
        true => Ok(()),
        false => Err(format!("not in the help of {first}: {unknown:?}")),
    }
}

async fn check_make_target(words: &[String]) -> Result<(), String> {
    let folder = root();
    let make = Invocation::new("make")
        .args(["-n", "-C", folder.to_str().unwrap_or_default()])
        .args(words.iter())
        .env("PATH", "/usr/bin:/bin");
    let output = make.output(DEADLINE).await;
    output.map(drop).map_err(|error| format!("{error:#}"))
}

fn check_known_flags(words: &[String], command: &clap::Command) -> Result<(), String> {
    let flags = words.iter().filter_map(|word| word.strip_prefix("--"));
    for flag in flags {
        let name = flag.split('=').next();
        let is_known = command.get_arguments().any(|arg| arg.get_long() == name);
        if !is_known && flag != "help" {
            return Err(format!("there is no --{flag}"));
        }
    }
    Ok(())
}

#[tokio::test]
async fn documented_steps_work_from_install_to_uninstall() -> TestResult {
    let entries = entries();
    let mut story = Story::start("docs").await?;
    story.run_blocks("README.md", "install").await;
    story.run_blocks("docs/how-to/install.md", "install").await;
    story.run_part(&entries, "look").await;
    story
        .run_blocks("docs/tutorials/quickstart.md", "quickstart")
        .await;
    story
        .run_blocks("docs/tutorials/upgrade-and-rollback.md", "upgrade-chart")
        .await;

    // Add the same cluster through its kubeconfig as well, and another one only through its kubeconfig.
    let other = Cluster::start("docs-other", Parts::ControlPlane).await?;
    story.write_file("edge-1.kubeconfig", &story.edge.kubeconfig_with_token());
    story.write_file("edge-2.yaml", &other.kubeconfig_with_token());
    story
        .run_blocks("docs/how-to/clusters.md", "by-kubeconfig")
        .await;
    story.run_part(&entries, "members").await;
    let fleet_client = FleetClient::new(&story.home);
    for member in ["edge-1", "edge-2"] {
        fleet_client.wait_for_member(member, &[CONNECTED]).await?;
    }

    story.run_part(&entries, "verbs").await;
    story.run_part(&entries, "runbook").await;
    story.run_part(&entries, "people").await;
    story.run_blocks("docs/how-to/migrate.md", "migrate").await;
    story.run_blocks("examples/README.md", "examples").await;
    story.run_part(&entries, "hub").await;
    story.run_part(&entries, "leave").await;
    story.run_part(&entries, "upgrade").await;
    story.run_part(&entries, "uninstall").await;

    // As documented, the uninstallation keeps the releases, and only the tutorial has upgraded them.
    let at_edge = FleetClient::new(&story.edge);
    let revisions = at_edge.revisions("acme-workspace", "tenant-acme-edge-1");
    let superseded = "superseded".to_owned();
    let expected = [
        (1, superseded.clone()),
        (2, superseded),
        (3, "deployed".to_owned()),
    ];
    assert_eq!(revisions.await?, expected);
    Ok(())
}

/// `make demo DEMO_ARGS=--exit` builds the demo and runs it with these arguments.
#[tokio::test]
async fn demo_runs_to_the_end() -> TestResult {
    let tools = Tools::find()?.bin();
    let demo = kubectl_krypton_path()?.with_file_name("demo");
    let demo = Invocation::new(demo)
        .arg("--exit")
        .env("PATH", "/usr/bin:/bin")
        .env("TMPDIR", std::env::temp_dir())
        .env("KRYPTON_TOOLS", tools.parent().unwrap());
    println!("{}", demo.output(DEMO_DEADLINE).await?);
    Ok(())
}

#[tokio::test]
async fn documented_installs_without_pods_and_with_charts_work() -> TestResult {
    let mut story = Story::start("docs-plain").await?;
    let plain = commands("docs/how-to/install.md")?.into_iter();
    let plain: Vec<Command> = plain
        .filter(|command| command.run.as_deref() == Some("without-pods"))
        .collect();
    let [namespace, hub, agent] = &plain[..] else {
        panic!("{plain:?}");
    };
    let typed = words(&namespace.text)?.split_off(1);
    story.home.kubectl(typed).await?;

    let port = Arc::new(Port::reserve()?);
    let hub_address = port.address().to_string();
    let typed = story
        .with_local_repository(&hub.text)
        .replace("hub.example.org:7443", &hub_address);
    let options = HubOptions::new(story.home.kubeconfig())
        .on_port(&port)
        .args(words(&typed)?.split_off(1));
    let mut hub = Hub::start_ready(&options).await?;
    let namespace = OwnChart::Hub.namespace();
    let bundle = bundle_in_namespace(&story.home, namespace, "edge-1").await?;
    let file = story.file("edge-1.yaml");
    write_secret(&file, &bundle)?;
    let checked = ["check", "--bundle", file.to_str().unwrap()];
    let checked = kubectl_krypton(&story.edge, &checked).await?;
    let reached = format!("✓ the hub responds at {hub_address} ");
    assert_contains!(checked, reached);
    let typed = agent.text.replace("edge-1.yaml", file.to_str().unwrap());
    let options = AgentOptions::new(story.edge.kubeconfig()).args(words(&typed)?.split_off(1));
    let mut agent = Agent::start_ready(&options).await?;
    let fleet_client = FleetClient::new(&story.home);
    fleet_client.wait_for_member("edge-1", &[CONNECTED]).await?;
    agent.stop().await?;
    hub.stop().await?;

    story
        .run_blocks("charts/krypton-hub/README.md", "install")
        .await;
    story
        .run_blocks("charts/krypton-agent/README.md", "install")
        .await;
    fleet_client.wait_for_member("edge-1", &[CONNECTED]).await?;
    Ok(())
}

#[test]
fn each_listed_part_is_played() {
    let source = read("tests/tests/e2e/docs_commands.rs");
    let (_, played) = source
        .split_once("async fn documented_steps_work_from")
        .unwrap();
    for run in PARTS.into_iter().chain(BLOCKS) {
        assert!(played.contains(&format!("\"{run}\")")), "{run}");
    }
}
