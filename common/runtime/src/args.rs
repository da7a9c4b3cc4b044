//! Command lines of hub and agent: Go's notation, variables that override flags, and errors that name the origin of a
//! value.

pub mod go_values;
pub mod page;
pub mod parsers;

use std::collections::BTreeMap;
use std::error::Error as _;
use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, Command, FromArgMatches};

/// Variables and the flags, without dashes, that they override. If several override one flag, the first one wins.
pub type Variables = &'static [(&'static str, &'static str)];

/// Reads a variable.
pub type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Origins of the values that are not defaults.
#[derive(Clone, Debug, Default)]
pub struct Origins {
    /// For each flag that is set, the variable that contains its value. `None` stands for the flag itself.
    sources: BTreeMap<String, Option<String>>,
    /// Flags that a variable overrides. To be logged.
    pub notes: Vec<String>,
}

impl Origins {
    /// Returns whether the value of the flag is not the default.
    pub fn is_set(&self, flag: &str) -> bool {
        self.sources.contains_key(flag)
    }

    /// Returns the origin of the flag's value, for messages.
    pub fn describe(&self, flag: &str) -> String {
        match self.sources.get(flag) {
            Some(Some(variable)) => format!("variable {variable}"),
            Some(None) => format!("flag --{flag}"),
            None => format!("default of --{flag}"),
        }
    }

    /// Returns the error for an invalid value of the flag.
    pub fn error(&self, flag: &str, problem: &str) -> clap::Error {
        usage_error(&format!("{}: {problem}", self.describe(flag)))
    }

    /// Returns the origins if Clap reads the variables: a flag on the command line overrides its variable.
    pub fn from_clap(command: &Command, argv: &[OsString]) -> Self {
        let args = || argv.iter().skip(1).filter_map(|arg| arg.to_str());
        let flag_names = args().filter_map(|arg| arg.strip_prefix("--"));
        let flag_names = flag_names.map(|arg| arg.split('=').next().unwrap_or_default());
        let flags = flag_names.map(|flag| (flag.to_owned(), None));
        let variables = command.get_arguments().filter_map(|arg| {
            let variable = arg
                .get_env()
                .filter(|name| std::env::var_os(name).is_some())?;
            let variable = Some(variable.to_str()?.to_owned());
            Some((arg.get_long()?.to_owned(), variable))
        });
        Self {
            sources: variables.chain(flags).collect(),
            notes: Vec::new(),
        }
    }
}

/// Returns a usage error, which ends the process with status 2.
pub fn usage_error(problem: &str) -> clap::Error {
    clap::Error::raw(ErrorKind::ValueValidation, format!("{problem}\n"))
}

/// Gives switches Go's notation, `--flag` and `--flag=false`. Adds the variables to the help. Hides a default that is
/// empty, or that the help itself describes.
pub fn with_variables(command: Command, variables: Variables) -> Command {
    command.mut_args(|arg| {
        let arg = match arg.get_action() {
            ArgAction::SetTrue => bool_flag(arg),
            _ => arg,
        };
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let is_empty = arg.get_default_values().iter().all(|text| text.is_empty());
        let arg = arg.hide_default_value(is_empty || help.contains("[default: "));
        let names = variables
            .iter()
            .filter(|(_, flag)| arg.get_long() == Some(flag));
        let names: Vec<&str> = names.map(|(variable, _)| *variable).collect();
        match names.is_empty() {
            true => arg,
            false => arg.help(format!("{help} [env: {}]", names.join(", "))),
        }
    })
}

fn bool_flag(arg: Arg) -> Arg {
    let arg = match arg.get_default_values() {
        [] => arg.default_value("false"),
        _ => arg,
    };
    arg.action(ArgAction::Set)
        .value_name("BOOL")
        .num_args(0..=1)
        .require_equals(true)
        .default_missing_value("true")
        .value_parser(parsers::boolean)
}

/// Reduces each flag to one value: that of its first variable, otherwise the last one given. Joins the values of a list by
/// commas. Flags may have one dash, as in Go.
///
/// Ignores empty variables, and empty flags that have no default or are in `blank`.
pub fn with_environment(
    command: &Command,
    argv: impl IntoIterator<Item = OsString>,
    variables: Variables,
    blank: &[&str],
    env: Env,
) -> (Vec<OsString>, Origins) {
    let (mut values, mut argv) = split(command, argv);
    values.retain(|flag, value| {
        let has_default = |arg: &Arg| {
            arg.get_default_values()
                .iter()
                .any(|value| !value.is_empty())
        };
        let has_default = find_arg(command, flag).is_some_and(has_default);
        !value.is_empty() || has_default && !blank.contains(&flag.as_str())
    });
    let mut origins = Origins {
        sources: values.keys().map(|flag| (flag.clone(), None)).collect(),
        notes: Vec::new(),
    };
    for (variable, flag) in variables {
        let Some(value) = env(variable).filter(|value| !value.is_empty()) else {
            continue;
        };
        if matches!(origins.sources.get(*flag), Some(Some(_))) {
            continue;
        }
        if values
            .get(*flag)
            .is_some_and(|flag_value| *flag_value != value)
        {
            let note = format!("variable {variable} overrides flag --{flag}");
            origins.notes.push(note);
        }
        values.insert((*flag).to_owned(), value);
        let variable = Some((*variable).to_owned());
        origins.sources.insert((*flag).to_owned(), variable);
    }
    let end = argv.iter().position(|arg| arg == "--");
    let end = end.unwrap_or(argv.len());
    let flags = values.iter();
    let flags = flags.map(|(flag, value)| OsString::from(format!("--{flag}={value}")));
    argv.splice(end..end, flags);
    (argv, origins)
}

/// Separates the known flags and their values from the rest of the command line.
fn split(
    command: &Command,
    argv: impl IntoIterator<Item = OsString>,
) -> (BTreeMap<String, String>, Vec<OsString>) {
    let mut values = BTreeMap::<String, String>::new();
    let mut argv = argv.into_iter();
    // The program's name.
    let mut rest: Vec<OsString> = argv.next().into_iter().collect();
    while let Some(word) = argv.next() {
        if word == "--" {
            rest.push(word);
            rest.extend(argv);
            break;
        }
        let word = with_two_dashes(word);
        let flag = word.to_str().and_then(|text| text.strip_prefix("--"));
        let (flag, value) = match flag.unwrap_or_default().split_once('=') {
            Some((flag, value)) => (flag, Some(value.to_owned())),
            None => (flag.unwrap_or_default(), None),
        };
        let Some(arg) = find_arg(command, flag) else {
            rest.push(word);
            continue;
        };
        let value = match value {
            Some(value) => value,
            None if arg.is_require_equals_set() => "true".to_owned(),
            None => match argv.next().map(OsString::into_string) {
                Some(Ok(value)) if value == "-" || !value.starts_with('-') => value,
                // Left to Clap: the value is missing, or is not UTF-8.
                other => {
                    let other = other.map(|value| value.map_or_else(|value| value, Into::into));
                    rest.push(word);
                    rest.extend(other);
                    continue;
                }
            },
        };
        let is_list = matches!(arg.get_action(), ArgAction::Append);
        values
            .entry(flag.to_owned())
            .and_modify(|previous| match is_list {
                true => *previous = format!("{previous},{value}"),
                false => previous.clone_from(&value),
            })
            .or_insert(value);
    }
    (values, rest)
}

fn find_arg<'a>(command: &'a Command, flag: &str) -> Option<&'a Arg> {
    let mut args = command.get_arguments();
    args.find(|arg| arg.get_long() == Some(flag))
}

/// Adds a dash to a word with one dash and a name of more than one letter.
fn with_two_dashes(word: OsString) -> OsString {
    let name = word.to_str().and_then(|text| text.strip_prefix('-'));
    let second = name.and_then(|name| name.chars().nth(1));
    if second.is_none_or(|second| second == '=') || name.is_some_and(|name| name.starts_with('-')) {
        return word;
    }
    let mut dashed = OsString::from("-");
    dashed.push(word);
    dashed
}

/// Parses a command line.
///
/// # Errors
/// A usage error that names the origin of an invalid value.
pub fn parse<A: FromArgMatches>(
    command: Command,
    argv: Vec<OsString>,
    origins: &Origins,
) -> Result<A, clap::Error> {
    let mut matches = command
        .try_get_matches_from(argv)
        .map_err(|error| explain(error, origins))?;
    A::from_arg_matches_mut(&mut matches)
}

/// Names the origin of an invalid value. The parser's message decides whether the value is shown.
fn explain(error: clap::Error, origins: &Origins) -> clap::Error {
    let arg = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(arg)) if error.kind() == ErrorKind::ValueValidation => arg,
        _ => return error,
    };
    // Such as `--self-cluster[=<BOOL>]`.
    let is_end = |c: char| !c.is_ascii_alphanumeric() && c != '-';
    let flag = arg.split(is_end).next().unwrap_or_default();
    match error.source() {
        Some(problem) => origins.error(flag.trim_start_matches('-'), &problem.to_string()),
        None => error,
    }
}

#[cfg(test)]
mod tests;
