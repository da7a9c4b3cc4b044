//! The pages of `kubectl krypton`, from its command line.

use clap::{Arg, Command, CommandFactory as _};
use krypton_kubectl::Cli;

use super::generated::{check, code, sentence, table};

/// Flags that every command has, and that only the overview lists.
const COMMON: [&str; 9] = [
    "help",
    "kubeconfig",
    "context",
    "as_user",
    "as_groups",
    "no-color",
    "namespace",
    "hub_namespace",
    "request_timeout",
];

fn is_common(arg: &Arg) -> bool {
    COMMON.contains(&arg.get_id().as_str())
}

/// Returns the program with all derived names, such as those in usage lines.
fn program() -> Command {
    let mut program = Cli::command();
    program.build();
    program
}

/// Returns the commands that users type.
fn commands(program: &Command) -> impl Iterator<Item = &Command> {
    let is_shown = |command: &&Command| !command.is_hide_set() && command.get_name() != "help";
    program.get_subcommands().filter(is_shown)
}

fn help(text: Option<&clap::builder::StyledStr>) -> String {
    sentence(&text.map(ToString::to_string).unwrap_or_default())
}

/// Returns the flag or the argument as a user types it, with the name of its value.
fn typed(arg: &Arg) -> String {
    let values = arg.get_value_names().unwrap_or_default();
    let value = values
        .iter()
        .map(|name| name.as_str())
        .collect::<Vec<_>>()
        .join(" ");
    let takes_value = arg.get_action().takes_values();
    match (arg.get_short(), arg.get_long()) {
        (_, None) => value,
        (short, Some(long)) => {
            let short = short.map(|short| format!("-{short}, ")).unwrap_or_default();
            let value = match takes_value {
                true => format!(" {value}"),
                false => String::new(),
            };
            format!("{short}--{long}{value}")
        }
    }
}

fn row(arg: &Arg) -> [String; 3] {
    let mut meaning = help(arg.get_help());
    let values = arg.get_possible_values();
    let visible = values.iter().filter(|value| !value.is_hide_set());
    let names: Vec<String> = visible.map(|value| code(value.get_name())).collect();
    if !names.is_empty() && arg.get_action().takes_values() {
        meaning = format!("{meaning} One of {}.", names.join(", "));
    }
    let default = match arg.get_default_values() {
        [value] if arg.get_action().takes_values() => code(&value.to_string_lossy()),
        _ => String::new(),
    };
    [code(&typed(arg)), default, meaning.trim().to_owned()]
}

fn arguments(command: &Command, is_listed: impl Fn(&Arg) -> bool) -> String {
    let visible = command.get_arguments().filter(|arg| !arg.is_hide_set());
    let rows: Vec<_> = visible.filter(|arg| is_listed(arg)).map(row).collect();
    table(["Argument or flag", "Default", "Meaning"], &rows)
}

/// Returns the examples of the command's help as a block, without the heading and the indentation.
fn examples(command: &Command) -> String {
    let help = command.get_after_help().map(ToString::to_string);
    let help = help.unwrap_or_default();
    let lines: Vec<&str> = help.lines().skip(1).map(str::trim_start).collect();
    format!("```sh\n{}\n```", lines.join("\n"))
}

#[test]
fn docs_command_pages_are_current() -> Result<(), String> {
    let program = program();
    for command in commands(&program) {
        let (effect, examples) = (help(command.get_about()), examples(command));
        let usage = command.clone().render_usage().to_string();
        let usage = format!("```text\n{}\n```", usage.trim());
        let arguments = arguments(command, |arg| !is_common(arg));
        let part = [effect, examples, usage, arguments].join("\n\n");
        check(&format!("kubectl/{}.md", command.get_name()), &part)?;
    }
    let row = |command: &Command| {
        let name = command.get_name();
        let link = format!("[`{name}`](kubectl/{name}.md)");
        [link, help(command.get_about())]
    };
    let rows: Vec<_> = commands(&program).map(row).collect();
    let list = table(["Command", "Effect"], &rows);
    let one = commands(&program).next().unwrap();
    let common = arguments(one, is_common);
    check(
        "kubectl.md",
        &format!("## Commands\n\n{list}\nEvery command has these flags:\n\n{common}"),
    )
}
