//! Provides shell completion. kubectl runs the program `kubectl_complete-krypton` from the PATH, a link to this one. It
//! passes the arguments so far, of which the last may be empty. It reads candidates and a directive in Cobra's format
//! (kubectl's "plugins", since 1.26).

use std::ffi::OsStr;
use std::path::Path;
use std::time::Duration;

use clap::builder::{PossibleValue, StyledStr};
use clap::{Arg, ArgAction, ArgMatches, Command};
use k8s_openapi::api::core::v1::Namespace;
use kube::api::ListParams;
use kube::core::ApiResource;

use crate::home::{Env, Target, TargetArgs, contexts};
use crate::kind::{Kind, KindArg};
use crate::objects::Scope;

/// Program name that selects completion.
const COMPLETION_PROGRAM: &str = "kubectl_complete-krypton";
/// Longest time that a user should wait for suggestions.
const DEADLINE: Duration = Duration::from_secs(1);
const MAX_NAMES: u32 = 500;
/// Cobra's directive that disables file name completion.
const NO_FILES: &str = ":4\n";
const FILES: &str = ":0\n";

/// Common values of log-level. Users type the levels of single targets.
const LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];

/// Source of the candidates for the next argument.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Completion {
    /// Values, each with a description.
    Values(Vec<(String, String)>),
    ObjectNames(Kind),
    Namespaces,
    Contexts,
    Files,
    Nothing,
}

/// Returns whether the shell started this program for completion.
pub(super) fn is_requested(program: Option<&OsStr>) -> bool {
    // Without the extension of Windows.
    program.and_then(|program| Path::new(program).file_stem())
        == Some(OsStr::new(COMPLETION_PROGRAM))
}

/// Returns the candidates for the last argument of a command line of `program`. Omits candidates that it cannot fetch,
/// without an error.
pub(super) async fn completions(program: &Command, args: &[String], env: Env<'_>) -> String {
    let (current, previous) = match args.split_last() {
        Some((current, previous)) => (current.as_str(), previous),
        None => ("", args),
    };
    let (command, matches) = parse_incomplete(program, previous);
    let values = match completion(&command, &matches, previous, current) {
        Completion::Files => return FILES.to_owned(),
        Completion::Values(values) => values,
        Completion::Contexts => without_help(contexts(env)),
        Completion::ObjectNames(kind) => without_help(list_names(Some(kind), &matches, env).await),
        Completion::Namespaces => without_help(list_names(None, &matches, env).await),
        Completion::Nothing => Vec::new(),
    };
    let mut text = String::new();
    for (value, help) in values {
        if value.starts_with(current) && !previous.contains(&value) {
            let tab = if help.is_empty() { "" } else { "\t" };
            text += &format!("{value}{tab}{help}\n");
        }
    }
    text + NO_FILES
}

/// Parses an incomplete command line. Returns the innermost subcommand and its arguments so far.
fn parse_incomplete(program: &Command, previous: &[String]) -> (Command, ArgMatches) {
    let mut command = program.clone().ignore_errors(true).no_binary_name(true);
    // Gives the arguments of all commands to each.
    command.build();
    let parsed = command.clone().try_get_matches_from(previous);
    let mut matches = parsed.unwrap_or_default();
    while let Some((name, submatches)) = matches.remove_subcommand() {
        if let Some(subcommand) = command.find_subcommand(&name) {
            command = subcommand.clone();
        }
        matches = submatches;
    }
    (command, matches)
}

/// Returns the candidates for the incomplete argument `current`, which follows `previous`.
fn completion(
    command: &Command,
    matches: &ArgMatches,
    previous: &[String],
    current: &str,
) -> Completion {
    if let Some(option) = previous
        .last()
        .and_then(|arg| option_before_value(command, arg))
    {
        return value_completion(option);
    }
    if current.starts_with('-') {
        let shown = |arg: &&Arg| !arg.is_positional() && !arg.is_hide_set();
        let options = command.get_arguments().filter(shown);
        let flags = options
            .filter_map(|it| Some((format!("--{}", it.get_long()?), short_help(it.get_help()))));
        return Completion::Values(flags.collect());
    }
    if command.has_subcommands() {
        let shown = command.get_subcommands().filter(|it| !it.is_hide_set());
        let values = shown.map(|it| (it.get_name().to_owned(), short_help(it.get_about())));
        return Completion::Values(values.collect());
    }
    let accepts_value = |arg: &&Arg| {
        let repeats = matches!(arg.get_action(), ArgAction::Append);
        repeats || matches.value_source(arg.get_id().as_str()).is_none()
    };
    let Some(positional) = command.get_positionals().find(accepts_value) else {
        return Completion::Nothing;
    };
    match (command.get_name(), positional.get_id().as_str()) {
        (_, "kind" | "of" | "program") => value_completion(positional),
        ("log-level", _) => Completion::Values(without_help(LEVELS.map(str::to_owned))),
        ("join" | "leave" | "accept" | "ban" | "unban", _) => {
            Completion::ObjectNames(Kind::Cluster)
        }
        _ => match matches.try_get_one::<KindArg>("kind") {
            Ok(Some(arg)) => Completion::ObjectNames(arg.kind),
            _ => Completion::Nothing,
        },
    }
}

/// Returns the option with this flag, if its value must follow.
fn option_before_value<'a>(command: &'a Command, flag: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|arg| {
        let long = arg.get_long().map(|long| format!("--{long}"));
        let short = arg.get_short().map(|short| format!("-{short}"));
        let needs_value = arg.get_num_args().is_none_or(|args| args.min_values() > 0);
        arg.get_action().takes_values()
            && needs_value
            && [long, short].contains(&Some(flag.to_owned()))
    })
}

fn value_completion(arg: &Arg) -> Completion {
    let values = arg.get_possible_values();
    if !values.is_empty() {
        let shown = values.iter().filter(|value| !value.is_hide_set());
        let candidate =
            |value: &PossibleValue| (value.get_name().to_owned(), short_help(value.get_help()));
        return Completion::Values(shown.map(candidate).collect());
    }
    match arg.get_long() {
        Some("namespace" | "hub-namespace") => Completion::Namespaces,
        Some("on") => Completion::ObjectNames(Kind::Cluster),
        Some("context" | "agent-context") => Completion::Contexts,
        Some(
            "kubeconfig" | "file" | "bundle" | "manifest" | "chart" | "values" | "helm" | "kind",
        ) => Completion::Files,
        _ => Completion::Nothing,
    }
}

fn without_help(values: impl IntoIterator<Item = String>) -> Vec<(String, String)> {
    let values = values.into_iter();
    values.map(|value| (value, String::new())).collect()
}

/// Returns the first sentence of the first line, without its full stop.
fn short_help(text: Option<&StyledStr>) -> String {
    let text = text.map(ToString::to_string).unwrap_or_default();
    let line = text.lines().next().unwrap_or_default();
    let sentence = line.split(". ").next().unwrap_or(line);
    sentence.trim_end_matches('.').to_owned()
}

fn selected_target<'a>(matches: &ArgMatches, env: Env<'a>) -> Target<'a> {
    let kubeconfig = matches.try_get_one("kubeconfig").ok().flatten().cloned();
    let context = matches.try_get_one("context").ok().flatten().cloned();
    let as_user = matches.try_get_one("as_user").ok().flatten().cloned();
    let as_groups = matches.try_get_many("as_groups").ok().flatten();
    let args = TargetArgs {
        kubeconfig,
        context,
        as_user,
        as_groups: as_groups.unwrap_or_default().cloned().collect(),
        ..TargetArgs::default()
    };
    Target { args, env }
}

/// Returns the names of the objects of a kind, or of the namespaces, on the cluster that the arguments select.
async fn list_names(kind: Option<Kind>, matches: &ArgMatches, env: Env<'_>) -> Vec<String> {
    let lookup = async {
        let home = selected_target(matches, env).connect().await.ok()?;
        let namespace = matches.try_get_one::<String>("namespace").ok().flatten();
        let objects = match kind {
            Some(kind) => {
                let scope = kind.scope(namespace.map(String::as_str), &home);
                home.untyped(kind.resource(), &scope)
            }
            None => home.untyped(ApiResource::erase::<Namespace>(&()), &Scope::All),
        };
        let params = ListParams::default().limit(MAX_NAMES);
        let list = objects.api.list_metadata(&params).await.ok()?;
        let names = list.items.into_iter().filter_map(|it| it.metadata.name);
        Some(names.collect())
    };
    let names = tokio::time::timeout(DEADLINE, Box::pin(lookup)).await;
    names.ok().flatten().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::cli::Cli;

    fn completion_of(line: &str) -> Completion {
        let args: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let (current, previous) = args.split_last().unwrap();
        let (command, matches) = parse_incomplete(&Cli::command(), previous);
        completion(&command, &matches, previous, current)
    }

    fn values(line: &str) -> Vec<String> {
        match completion_of(line) {
            Completion::Values(values) => values.into_iter().map(|(value, _)| value).collect(),
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn completions_match_accepted_arguments() {
        for value in ["get", "join", "leave", "pause", "version"] {
            assert!(values("").contains(&value.to_owned()), "{value}");
        }
        assert_eq!(values("get "), ["clusters", "tenants", "deployments"]);
        let formats = ["table", "wide", "name", "json", "yaml", "jsonpath="];
        assert_eq!(values("get tenants -o "), formats);
        assert!(values("get tenants --").contains(&"--all-namespaces".to_owned()));
        assert_eq!(values("log-level "), ["hub", "agent"]);
        assert_eq!(values("log-level agent "), LEVELS);
        let options = values("log-level hub --");
        assert!(options.contains(&"--for".to_owned()), "{options:?}");
        assert!(!options.contains(&"--debug-address".to_owned()));
        for (line, expected) in [
            ("get tenants ", Completion::ObjectNames(Kind::Tenant)),
            ("get -o wide ec ", Completion::ObjectNames(Kind::Cluster)),
            ("get tenants acme ", Completion::ObjectNames(Kind::Tenant)),
            (
                "pause deployment a ",
                Completion::ObjectNames(Kind::Deployment),
            ),
            ("pause tenant -n ", Completion::Namespaces),
            ("-n ", Completion::Namespaces),
            ("join --hub-namespace ", Completion::Namespaces),
            ("join ", Completion::ObjectNames(Kind::Cluster)),
            ("ban edge-1 ", Completion::ObjectNames(Kind::Cluster)),
            ("get clusters --context ", Completion::Contexts),
            ("get clusters --kubeconfig ", Completion::Files),
            ("version ", Completion::Nothing),
            ("log-level hub debug ", Completion::Nothing),
            ("log-level hub debug --for ", Completion::Nothing),
        ] {
            assert_eq!(completion_of(line), expected, "{line}");
        }
    }

    #[test]
    fn typed_options_determine_name_lookup() {
        let line = "-n team get tenants --context=edge --kubeconfig f";
        let args: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let (_, matches) = parse_incomplete(&Cli::command(), &args);
        assert_eq!(matches.get_one::<String>("namespace").unwrap(), "team");
        let target_args = selected_target(&matches, &|_| None).args;
        assert_eq!(target_args.context.as_deref(), Some("edge"));
        assert_eq!(target_args.kubeconfig.as_deref(), Some(Path::new("f")));
        assert!(!matches.contains_id("output"));
    }
}
