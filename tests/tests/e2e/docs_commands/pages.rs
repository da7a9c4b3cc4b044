//! Extracts the commands for users from the text of the documentation pages.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The first word of a command.
const PROGRAMS: [&str; 14] = [
    "cargo",
    "cat",
    "curl",
    "docker",
    "git",
    "gpg",
    "helm",
    "krypton-agent",
    "krypton-hub",
    "kubectl",
    "kubectl-krypton",
    "ln",
    "make",
    "openssl",
];
/// Languages of code blocks without commands.
const OTHER_LANGUAGES: [&str; 4] = ["yaml", "json", "promql", "text"];

/// A command, including its continuation lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Command {
    pub(crate) page: String,
    /// On one line, without the trailing comment.
    pub(crate) text: String,
    /// The text after `# `.
    pub(crate) remark: String,
    /// The runner of the block, if the page names one.
    pub(crate) run: Option<String>,
}

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the content of a file. The path is relative to the root.
pub(crate) fn read(path: &str) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns all pages for users and contributors, as paths relative to the root.
pub(crate) fn pages() -> Vec<String> {
    let mut pages = ["README.md", "CONTRIBUTING.md", "SECURITY.md"]
        .map(str::to_owned)
        .to_vec();
    let mut folders: Vec<String> = ["charts", "docs", "examples"].map(str::to_owned).into();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(root().join(&folder)).unwrap() {
            let entry = entry.unwrap();
            let path = format!("{folder}/{}", entry.file_name().into_string().unwrap());
            if entry.file_type().unwrap().is_dir() {
                folders.push(path);
            } else if path.ends_with(".md") {
                pages.push(path);
            }
        }
    }
    pages.sort();
    pages
}

/// Returns all commands of a page.
/// Returns an error if a block or a stray mark could hide a command.
pub(crate) fn commands(page: &str) -> Result<Vec<Command>, String> {
    let text = fs::read_to_string(root().join(page)).map_err(|error| error.to_string())?;
    parse_commands(page, &text)
}

fn parse_commands(page: &str, text: &str) -> Result<Vec<Command>, String> {
    let mut commands = Vec::new();
    let mut paragraph = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if let Some(info) = line.trim_start().strip_prefix("```") {
            commands.extend(inline(page, &std::mem::take(&mut paragraph))?);
            let body: Vec<&str> = lines
                .by_ref()
                .take_while(|line| !line.trim_start().starts_with("```"))
                .collect();
            commands.extend(block(page, info, &body.join("\n"))?);
        } else if line.trim().is_empty() || line.starts_with('|') {
            commands.extend(inline(page, &std::mem::take(&mut paragraph))?);
            commands.extend(inline(page, line)?);
        } else {
            paragraph.push_str(line);
            paragraph.push('\n');
        }
    }
    commands.extend(inline(page, &paragraph)?);
    Ok(commands)
}

fn block(page: &str, info: &str, body: &str) -> Result<Vec<Command>, String> {
    let (language, more) = info.split_once(' ').unwrap_or((info, ""));
    let commands = commands_in(page, body);
    if language == "sh" {
        let run = more.strip_prefix("run=").map(str::to_owned);
        let with_run = |command| Command {
            run: run.clone(),
            ..command
        };
        return Ok(commands.into_iter().map(with_run).collect());
    }
    match commands.first() {
        Some(command) if language.is_empty() || OTHER_LANGUAGES.contains(&language) => Err(
            format!("{page}: a block of commands is ```sh: {}", command.text),
        ),
        Some(_) => Err(format!("{page}: ```{language} is no language of a block")),
        None => Ok(Vec::new()),
    }
}

/// Returns the commands in these lines. A command can continue after a backslash.
pub(crate) fn commands_in(page: &str, body: &str) -> Vec<Command> {
    let mut commands = Vec::new();
    let mut lines = body.lines();
    while let Some(line) = lines.next() {
        let (mut text, mut remark) = split(line);
        while let Some(begun) = text.strip_suffix('\\') {
            let (more, comment) = split(lines.next().unwrap_or_default());
            text = format!("{} {more}", begun.trim_end());
            remark = comment;
        }
        if is_command(&text) {
            let (page, run) = (page.to_owned(), None);
            commands.push(Command {
                page,
                text,
                remark,
                run,
            });
        }
    }
    commands
}

/// Splits a line into the command, with single blanks, and the trailing comment.
fn split(line: &str) -> (String, String) {
    let (text, remark) = line.split_once(" #").unwrap_or((line, ""));
    let text: Vec<&str> = text.split_whitespace().collect();
    (text.join(" "), remark.trim().to_owned())
}

/// Returns the commands between backquotes in a paragraph, also across line breaks.
fn inline(page: &str, paragraph: &str) -> Result<Vec<Command>, String> {
    let parts: Vec<&str> = paragraph.split('`').collect();
    if parts.len().is_multiple_of(2) {
        return Err(format!("{page}: a backquote too many: {paragraph}"));
    }
    let spans = parts.into_iter().skip(1).step_by(2);
    let texts = spans.map(|span| span.split_whitespace().collect::<Vec<_>>().join(" "));
    let commands = texts.filter(|text| is_command(text)).map(|text| Command {
        page: page.to_owned(),
        text,
        remark: String::new(),
        run: None,
    });
    Ok(commands.collect())
}

fn is_command(text: &str) -> bool {
    let (first, more) = text.split_once(' ').unwrap_or((text, ""));
    let known = PROGRAMS.contains(&first) || first.starts_with("hack/");
    known && (first == "make" || !more.is_empty())
}

/// Returns true if the text only mentions a verb without an object, as in "run `helm uninstall --keep-history`".
pub(crate) fn is_mention(text: &str) -> bool {
    let mut words = text.split(' ');
    let named = matches!(words.next(), Some("kubectl" | "helm" | "docker" | "gpg"));
    let verb = words.next();
    let verbs = usize::from(verb == Some("krypton"));
    named && words.skip(verbs).all(|word| word.starts_with('-'))
}

/// Splits a command into words like a shell, up to the first redirection or pipe.
/// Returns an error if a quote is not closed.
pub(crate) fn words(text: &str) -> Result<Vec<String>, String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for letter in text.chars() {
        match (quote, letter) {
            (Some(open), letter) if open == letter => quote = None,
            (None, '\'' | '"') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (None, '>' | '|' | '<') => break,
            (None, letter) if letter.is_whitespace() => words.extend(word.take()),
            (_, letter) => word.get_or_insert_default().push(letter),
        }
    }
    if quote.is_some() {
        return Err(format!("a quote is open in {text}"));
    }
    words.extend(word);
    Ok(words)
}

#[test]
fn commands_are_found_in_blocks_and_across_lines() {
    let page = "Say `kubectl get\npods`, not `kubectl`.\n\n```sh run=install\n# a remark\nhelm install a b \\\n  \
                --set c=d   # at edge-1: now\n```\n\n| `make x` | `e` |\n";
    let parsed = parse_commands("page", page).unwrap();
    let all: Vec<(&str, &str, Option<&str>)> = parsed
        .iter()
        .map(|parsed| {
            (
                parsed.text.as_str(),
                parsed.remark.as_str(),
                parsed.run.as_deref(),
            )
        })
        .collect();
    let expected = [
        ("kubectl get pods", "", None),
        (
            "helm install a b --set c=d",
            "at edge-1: now",
            Some("install"),
        ),
        ("make x", "", None),
    ];
    assert_eq!(all, expected);
}

#[test]
fn command_in_unexpected_place_is_rejected() {
    for page in [
        "```\nkubectl get pods\n```",
        "```text\nmake x\n```",
        "one ` alone",
    ] {
        assert!(parse_commands("page", page).is_err(), "{page}");
    }
    assert!(
        parse_commands("page", "```yaml\nkind: Pod\n```")
            .unwrap()
            .is_empty()
    );
}

#[test]
fn words_are_split_like_in_a_shell() {
    let text = r#"kubectl patch x -p '{"a": 1}' --b="c d" > file"#;
    let expected = ["kubectl", "patch", "x", "-p", r#"{"a": 1}"#, "--b=c d"];
    assert_eq!(words(text).unwrap(), expected);
    assert!(words("kubectl 'x").is_err());
}
