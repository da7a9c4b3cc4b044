//! Provides shell completion. kubectl runs the program `kubectl_complete-krypton` from the PATH, a link to this one. It
//! passes the arguments so far, of which the last may be empty. It reads candidates and a directive in Cobra's format
//! (kubectl's "plugins", since 1.26).

use std::ffi::OsStr;
use std::path::Path;
use std::time::Duration;

use clap::builder::{PossibleValue, StyledStr};
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory as _};
use k8s_openapi::api::core::v1::Namespace;
use kube::api::ListParams;
use kube::core::ApiResource;

use crate::cli::Cli;
use crate::home::{Env, Target, TargetArgs, contexts};
use crate::kind::Kind;
use crate::objects::Scope;

/// Program name that selects completion.
const NAME: &str = "kubectl_complete-krypton";
/// Longest time that a user should wait for suggestions.
const DEADLINE: Duration = Duration::from_secs(1);
const MOST: u32 = 500;
/// Cobra's directive that disables file name completion.
const NO_FILES: &str = ":4\n";
const FILES: &str = ":0\n";

/// Common values of log-level. Users type the levels of single targets.
const LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];

/// Candidates for the next word.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Next {
    /// Words, each with a description.
    Words(Vec<(String, String)>),
    Names(Kind),
    Namespaces,
    Contexts,
    Files,
    Nothing,
}

/// Returns whether the shell started this program for completion.
pub(super) fn is_requested(program: Option<&OsStr>) -> bool {
    program.and_then(|program| Path::new(program).file_name()) == Some(OsStr::new(NAME))
}

/// Returns the completions of the arguments `words`. Omits candidates that it cannot fetch, without an error.
pub(super) async fn answer(words: &[String], env: Env<'_>) -> String {
    let (last, before) = match words.split_last() {
        Some((last, before)) => (last.as_str(), before),
        None => ("", words),
    };
    let (command, matches) = typed(before);
    let (next, names) = match next(&command, &matches, before, last) {
        Next::Files => return FILES.to_owned(),
        Next::Words(words) => (words, Vec::new()),
        Next::Contexts => (Vec::new(), contexts(env)),
        Next::Names(kind) => (Vec::new(), names(Some(kind), &matches, env).await),
        Next::Namespaces => (Vec::new(), names(None, &matches, env).await),
        Next::Nothing => Default::default(),
    };
    let mut text = String::new();
    for (word, help) in next.into_iter().chain(names.into_iter().map(without_help)) {
        if word.starts_with(last) && !before.contains(&word) {
            let tab = if help.is_empty() { "" } else { "\t" };
            text += &format!("{word}{tab}{help}\n");
        }
    }
    text + NO_FILES
}

/// Parses an incomplete command line. Returns the innermost subcommand and its arguments so far.
fn typed(before: &[String]) -> (Command, ArgMatches) {
    let mut command = Cli::command().ignore_errors(true).no_binary_name(true);
    // Gives the arguments of all commands to each.
    command.build();
    let parsed = command.clone().try_get_matches_from(before);
    let mut matches = parsed.unwrap_or_default();
    while let Some((name, deeper)) = matches.remove_subcommand() {
        if let Some(found) = command.find_subcommand(&name) {
            command = found.clone();
        }
        matches = deeper;
    }
    (command, matches)
}

/// Returns the candidates for the incomplete argument `last`, which follows `before`.
fn next(command: &Command, matches: &ArgMatches, before: &[String], last: &str) -> Next {
    if let Some(option) = before.last().and_then(|word| option(command, word)) {
        return value_of(option);
    }
    if last.starts_with('-') {
        let shown = |arg: &&Arg| !arg.is_positional() && !arg.is_hide_set();
        let options = command.get_arguments().filter(shown);
        let long =
            options.filter_map(|it| Some((format!("--{}", it.get_long()?), help(it.get_help()))));
        return Next::Words(long.collect());
    }
    if command.has_subcommands() {
        let shown = command.get_subcommands().filter(|it| !it.is_hide_set());
        let words = shown.map(|it| (it.get_name().to_owned(), help(it.get_about())));
        return Next::Words(words.collect());
    }
    let is_open = |arg: &&Arg| {
        let repeats = matches!(arg.get_action(), ArgAction::Append);
        repeats || matches.value_source(arg.get_id().as_str()).is_none()
    };
    let Some(positional) = command.get_positionals().find(is_open) else {
        return Next::Nothing;
    };
    match (command.get_name(), positional.get_id().as_str()) {
        (_, "kind" | "of" | "program") => value_of(positional),
        ("log-level", _) => Next::Words(LEVELS.map(str::to_owned).map(without_help).to_vec()),
        ("join" | "leave" | "accept" | "ban" | "unban", _) => Next::Names(Kind::Cluster),
        _ => match matches.try_get_one::<Kind>("kind") {
            Ok(Some(kind)) => Next::Names(*kind),
            _ => Next::Nothing,
        },
    }
}

/// Returns the option that a word names, if its value must follow.
fn option<'a>(command: &'a Command, word: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|arg| {
        let long = arg.get_long().map(|long| format!("--{long}"));
        let short = arg.get_short().map(|short| format!("-{short}"));
        let needs_value = arg.get_num_args().is_none_or(|args| args.min_values() > 0);
        arg.get_action().takes_values()
            && needs_value
            && [long, short].contains(&Some(word.to_owned()))
    })
}

fn value_of(arg: &Arg) -> Next {
    let values = arg.get_possible_values();
    if !values.is_empty() {
        let shown = values.iter().filter(|value| !value.is_hide_set());
        let word = |value: &PossibleValue| (value.get_name().to_owned(), help(value.get_help()));
        return Next::Words(shown.map(word).collect());
    }
    match arg.get_long() {
        Some("namespace" | "hub-namespace") => Next::Namespaces,
        Some("on") => Next::Names(Kind::Cluster),
        Some("context" | "agent-context") => Next::Contexts,
        Some("kubeconfig" | "output-file" | "chart" | "values" | "helm") => Next::Files,
        _ => Next::Nothing,
    }
}

fn without_help(word: String) -> (String, String) {
    (word, String::new())
}

/// Returns the first sentence of the first line, without its full stop.
fn help(text: Option<&StyledStr>) -> String {
    let text = text.map(ToString::to_string).unwrap_or_default();
    let line = text.lines().next().unwrap_or_default();
    let sentence = line.split(". ").next().unwrap_or(line);
    sentence.trim_end_matches('.').to_owned()
}

/// Returns the selected cluster.
fn target<'a>(matches: &ArgMatches, env: Env<'a>) -> Target<'a> {
    let kubeconfig = matches.try_get_one("kubeconfig").ok().flatten().cloned();
    let context = matches.try_get_one("context").ok().flatten().cloned();
    let as_user = matches.try_get_one("as_user").ok().flatten().cloned();
    let args = TargetArgs {
        kubeconfig,
        context,
        as_user,
    };
    Target { args, env }
}

/// Returns the names of the objects of a kind, or of the namespaces, on the cluster that the arguments select.
async fn names(kind: Option<Kind>, matches: &ArgMatches, env: Env<'_>) -> Vec<String> {
    let listing = async {
        let home = target(matches, env).connect().await.ok()?;
        let namespace = matches.try_get_one::<String>("namespace").ok().flatten();
        let objects = match kind {
            Some(kind) => {
                let scope = kind.scope(namespace.map(String::as_str), &home);
                home.untyped(kind.resource(), &scope)
            }
            None => home.untyped(ApiResource::erase::<Namespace>(&()), &Scope::All),
        };
        let params = ListParams::default().limit(MOST);
        let found = objects.api.list_metadata(&params).await.ok()?;
        let names = found.items.into_iter().filter_map(|it| it.metadata.name);
        Some(names.collect())
    };
    let listed = tokio::time::timeout(DEADLINE, Box::pin(listing)).await;
    listed.ok().flatten().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::Output;

    fn next_of(line: &str) -> Next {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let (last, before) = words.split_last().unwrap();
        let (command, matches) = typed(before);
        next(&command, &matches, before, last)
    }

    fn words(line: &str) -> Vec<String> {
        match next_of(line) {
            Next::Words(words) => words.into_iter().map(|(word, _)| word).collect(),
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn completions_match_accepted_arguments() {
        for word in ["get", "join", "leave", "pause", "version"] {
            assert!(words("").contains(&word.to_owned()), "{word}");
        }
        assert_eq!(words("get "), ["clusters", "tenants", "deployments"]);
        assert_eq!(words("get tenants -o "), ["wide", "name", "json", "yaml"]);
        assert!(words("get tenants --").contains(&"--all-namespaces".to_owned()));
        assert_eq!(words("log-level "), ["hub", "agent"]);
        assert_eq!(words("log-level agent "), LEVELS);
        let options = words("log-level hub --");
        assert!(options.contains(&"--for".to_owned()), "{options:?}");
        assert!(!options.contains(&"--debug-address".to_owned()));
        for (line, next) in [
            ("get tenants ", Next::Names(Kind::Tenant)),
            ("get -o wide ec ", Next::Names(Kind::Cluster)),
            ("get tenants acme ", Next::Nothing),
            ("pause deployment a ", Next::Names(Kind::Deployment)),
            ("pause tenant -n ", Next::Namespaces),
            ("join ", Next::Names(Kind::Cluster)),
            ("ban edge-1 ", Next::Names(Kind::Cluster)),
            ("get clusters --context ", Next::Contexts),
            ("get clusters --kubeconfig ", Next::Files),
            ("version ", Next::Nothing),
            ("log-level hub debug ", Next::Nothing),
            ("log-level hub debug --for ", Next::Nothing),
        ] {
            assert_eq!(next_of(line), next, "{line}");
        }
    }

    #[test]
    fn typed_options_determine_name_lookup() {
        let line = "get tenants -n team --context=edge --kubeconfig f";
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let (_, matches) = typed(&words);
        assert_eq!(matches.get_one::<String>("namespace").unwrap(), "team");
        let home = target(&matches, &|_| None).args;
        assert_eq!(home.context.as_deref(), Some("edge"));
        assert_eq!(home.kubeconfig.as_deref(), Some(Path::new("f")));
        assert_eq!(matches.get_one::<Output>("output"), None);
    }
}
