//! Provides shell completion. kubectl runs the program `kubectl_complete-krypton` from the PATH, a link to this one. It
//! passes the arguments so far, of which the last may be empty. It reads candidates and a directive in Cobra's format
//! (kubectl's "plugins", since 1.26).

use std::ffi::OsStr;
use std::path::Path;
use std::time::Duration;

use clap::{Arg, ArgAction, Command, CommandFactory as _};
use k8s_openapi::api::core::v1::Namespace;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_crds::krypton_deployment::KryptonDeployment;
use krypton_crds::tenant::Tenant;
use kube::Api;
use kube::api::{DynamicObject, ListParams};
use kube::core::ApiResource;

use crate::cli::Cli;
use crate::home::{HomeArgs, connect};

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
    /// Names of objects.
    Names(Objects),
    Contexts,
    Files,
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Objects {
    Clusters,
    Tenants,
    Deployments,
    Namespaces,
}

/// Returns whether the shell started this program for completion.
pub(super) fn is_asked(program: Option<&OsStr>) -> bool {
    program.and_then(|program| Path::new(program).file_name()) == Some(OsStr::new(NAME))
}

/// Returns the completions of the arguments `words`. Omits candidates that it cannot fetch, without an error.
pub(super) async fn answer(words: &[String], env: &dyn Fn(&str) -> Option<String>) -> String {
    let (before, last) = match words.split_last() {
        Some((last, before)) => (before, last.as_str()),
        None => (words, ""),
    };
    let found = match next(&Cli::command(), before, last) {
        Next::Files => return FILES.to_owned(),
        Next::Nothing => Vec::new(),
        Next::Words(words) => words,
        Next::Contexts => crate::home::contexts(env)
            .into_iter()
            .map(|name| (name, String::new()))
            .collect(),
        Next::Names(objects) => {
            let asking = Box::pin(names(objects, before, env));
            let names = tokio::time::timeout(DEADLINE, asking).await;
            let names = names.ok().flatten().unwrap_or_default();
            names
                .into_iter()
                .map(|name| (name, String::new()))
                .collect()
        }
    };
    let mut text = String::new();
    for (word, help) in found {
        if word.starts_with(last) && !before.contains(&word) {
            let tab = if help.is_empty() { "" } else { "\t" };
            text += &format!("{word}{tab}{help}\n");
        }
    }
    text + NO_FILES
}

/// Returns the candidates after the arguments `before`, where `last` is incomplete.
fn next(root: &Command, before: &[String], last: &str) -> Next {
    let mut command = root;
    let mut taken: Vec<&str> = Vec::new();
    let mut words = before.iter().map(String::as_str);
    while let Some(word) = words.next() {
        if let Some(option) = option(command, word) {
            if option.get_action().takes_values()
                && !word.contains('=')
                && option
                    .get_num_args()
                    .is_none_or(|args| args.min_values() > 0)
                && words.next().is_none()
            {
                return value_of(option);
            }
        } else if let Some(deeper) = command.find_subcommand(word) {
            (command, taken) = (deeper, Vec::new());
        } else {
            taken.push(word);
        }
    }
    if last.starts_with('-') {
        let options = command.get_arguments();
        let options = options.filter(|arg| !arg.is_positional() && !arg.is_hide_set());
        let long = options
            .filter_map(|arg| Some((format!("--{}", arg.get_long()?), help(arg.get_help()))));
        return Next::Words(long.collect());
    }
    let deeper = command
        .get_subcommands()
        .filter(|deeper| !deeper.is_hide_set());
    let deeper: Vec<_> = deeper
        .map(|deeper| (deeper.get_name().to_owned(), help(deeper.get_about())))
        .collect();
    if !deeper.is_empty() {
        return Next::Words(deeper);
    }
    let positionals: Vec<&Arg> = command.get_positionals().collect();
    let at = taken.len().min(positionals.len().saturating_sub(1));
    let Some(positional) = positionals.get(at) else {
        return Next::Nothing;
    };
    if taken.len() > at && !matches!(positional.get_action(), ArgAction::Append) {
        return Next::Nothing;
    }
    let values = positional.get_possible_values();
    if !values.is_empty() {
        let words = values.iter().filter(|value| !value.is_hide_set());
        let words = words.map(|value| (value.get_name().to_owned(), help(value.get_help())));
        return Next::Words(words.collect());
    }
    match (command.get_name(), taken.first()) {
        ("log-level", _) => Next::Words(LEVELS.map(|it| (it.to_owned(), String::new())).to_vec()),
        ("version" | "completion", _) => Next::Nothing,
        ("join" | "leave" | "accept" | "ban" | "unban", _) => Next::Names(Objects::Clusters),
        (_, Some(kind)) => named(kind).map_or(Next::Nothing, Next::Names),
        _ => Next::Nothing,
    }
}

fn named(kind: &str) -> Option<Objects> {
    match kind {
        "clusters" | "cluster" | "edgecluster" | "edgeclusters" | "ec" => Some(Objects::Clusters),
        "tenants" | "tenant" | "tn" => Some(Objects::Tenants),
        "deployments" | "deployment" | "kryptondeployment" | "kryptondeployments" | "kd" => {
            Some(Objects::Deployments)
        }
        _ => None,
    }
}

/// Returns the option that a word names, if any.
fn option<'a>(command: &'a Command, word: &str) -> Option<&'a Arg> {
    let name = word.split('=').next().unwrap_or(word);
    command.get_arguments().find(|arg| {
        let long = arg.get_long().map(|long| format!("--{long}"));
        let short = arg.get_short().map(|short| format!("-{short}"));
        long.as_deref() == Some(name) || short.as_deref() == Some(name)
    })
}

fn value_of(option: &Arg) -> Next {
    let values = option.get_possible_values();
    if !values.is_empty() {
        let words = values
            .iter()
            .map(|value| (value.get_name().to_owned(), help(value.get_help())));
        return Next::Words(words.collect());
    }
    match option.get_long() {
        Some("namespace" | "hub-namespace") => Next::Names(Objects::Namespaces),
        Some("on") => Next::Names(Objects::Clusters),
        Some("context") => Next::Contexts,
        Some("kubeconfig" | "output-file" | "chart") => Next::Files,
        _ => Next::Nothing,
    }
}

/// Returns the first sentence of the first line, without its full stop.
fn help(text: Option<&clap::builder::StyledStr>) -> String {
    let text = text.map(ToString::to_string).unwrap_or_default();
    let line = text.lines().next().unwrap_or_default();
    line.split(". ")
        .next()
        .unwrap_or(line)
        .trim_end_matches('.')
        .to_owned()
}

/// Returns the value of an option among the arguments typed so far.
fn typed<'a>(before: &'a [String], names: &[&str]) -> Option<&'a str> {
    let mut words = before.iter().map(String::as_str);
    while let Some(word) = words.next() {
        for name in names {
            match word.strip_prefix(name) {
                Some("") => return words.next(),
                Some(rest) if rest.starts_with('=') => return rest.get(1..),
                _ => {}
            }
        }
    }
    None
}

async fn names(
    objects: Objects,
    before: &[String],
    env: &dyn Fn(&str) -> Option<String>,
) -> Option<Vec<String>> {
    let args = HomeArgs {
        kubeconfig: typed(before, &["--kubeconfig"]).map(Into::into),
        context: typed(before, &["--context"]).map(str::to_owned),
    };
    let home = connect(&args, env).await.ok()?;
    let kind = match objects {
        Objects::Clusters => ApiResource::erase::<EdgeCluster>(&()),
        Objects::Tenants => ApiResource::erase::<Tenant>(&()),
        Objects::Deployments => ApiResource::erase::<KryptonDeployment>(&()),
        Objects::Namespaces => ApiResource::erase::<Namespace>(&()),
    };
    let namespace = typed(before, &["--namespace", "-n"]).unwrap_or(&home.namespace);
    let api: Api<DynamicObject> = match objects {
        Objects::Clusters | Objects::Namespaces => Api::all_with(home.client, &kind),
        Objects::Tenants | Objects::Deployments => {
            Api::namespaced_with(home.client, namespace, &kind)
        }
    };
    let found = api
        .list_metadata(&ListParams::default().limit(MOST))
        .await
        .ok()?;
    Some(
        found
            .items
            .into_iter()
            .filter_map(|object| object.metadata.name)
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next_of(line: &str) -> Next {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let (last, before) = words.split_last().unwrap();
        next(&Cli::command(), before, last)
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
        assert_eq!(words("get tenants -o "), ["wide", "json", "yaml"]);
        assert!(words("get tenants --").contains(&"--all-namespaces".to_owned()));
        assert_eq!(words("log-level "), ["hub", "agent"]);
        assert_eq!(words("log-level agent "), LEVELS);
        let options = words("log-level hub --");
        assert!(options.contains(&"--for".to_owned()), "{options:?}");
        assert!(!options.contains(&"--debug-address".to_owned()));
        for (line, next) in [
            ("get tenants ", Next::Names(Objects::Tenants)),
            ("get -o wide ec ", Next::Names(Objects::Clusters)),
            ("get tenants acme ", Next::Nothing),
            ("pause deployment a ", Next::Names(Objects::Deployments)),
            ("pause tenant -n ", Next::Names(Objects::Namespaces)),
            ("join ", Next::Names(Objects::Clusters)),
            ("ban edge-1 ", Next::Names(Objects::Clusters)),
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
        let line: Vec<String> = ["get", "-n", "team", "--context=edge", "--kubeconfig", "f"]
            .map(str::to_owned)
            .to_vec();
        assert_eq!(typed(&line, &["--namespace", "-n"]), Some("team"));
        assert_eq!(typed(&line, &["--context"]), Some("edge"));
        assert_eq!(typed(&line, &["--kubeconfig"]), Some("f"));
        assert_eq!(typed(&line, &["--output"]), None);
    }
}
