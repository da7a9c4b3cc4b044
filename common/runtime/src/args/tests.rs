use super::*;

/// A command line with a flag of each kind.
fn command() -> Command {
    let command = Command::new("program")
        .arg(
            Arg::new("name")
                .long("chart-name")
                .default_value("a")
                .help("Name."),
        )
        .arg(
            Arg::new("context")
                .long("watch-context")
                .help("Context [default: none]"),
        )
        .arg(Arg::new("on").long("zap-devel").action(ArgAction::SetTrue))
        .arg(Arg::new("list").long("advertise").action(ArgAction::Append))
        .arg(
            Arg::new("range")
                .long("runs")
                .value_parser(parsers::number(1..=64u8, "write fewer")),
        );
    with_variables(command, VARIABLES)
}

const VARIABLES: Variables = &[
    ("FIRST", "chart-name"),
    ("SECOND", "chart-name"),
    ("LIST", "advertise"),
    ("RUNS", "runs"),
];

fn parse_environment(args: &[&str], env: &[(&str, &str)]) -> (Vec<OsString>, Origins) {
    let argv = ["program"].iter().chain(args).map(OsString::from);
    let env = |name: &str| {
        let found = env.iter().find(|(variable, _)| *variable == name);
        found.map(|(_, text)| (*text).to_owned())
    };
    with_environment(&command(), argv, VARIABLES, &["chart-name"], &env)
}

fn resulting_args(args: &[&str], env: &[(&str, &str)]) -> Vec<String> {
    let resulting_args = parse_environment(args, env).0.into_iter().skip(1);
    resulting_args
        .map(|arg| arg.into_string().unwrap())
        .collect()
}

#[test]
fn one_dash_becomes_two_except_in_values() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["-chart-name", "x"], &["--chart-name=x"]),
        (&["-chart-name=x"], &["--chart-name=x"]),
        (&["--chart-name", "x"], &["--chart-name=x"]),
        (&["-zap-devel"], &["--zap-devel=true"]),
        (&["-zap-devel=false"], &["--zap-devel=false"]),
        (
            &["-zap-devel", "-chart-name", "x"],
            &["--chart-name=x", "--zap-devel=true"],
        ),
        (&["-h"], &["-h"]),
        (&["-V"], &["-V"]),
        (&["-help"], &["--help"]),
        (&["-unknown"], &["--unknown"]),
        (
            &["-watch-context", "-chart-name"],
            &["--watch-context", "-chart-name"],
        ),
        (&["--", "-chart-name"], &["--", "-chart-name"]),
        (&["-zap-devel", "--", "a"], &["--zap-devel=true", "--", "a"]),
        (&["-"], &["-"]),
        (&["-chart-name", "-"], &["--chart-name=-"]),
        (&["-chart-name"], &["--chart-name"]),
        (&[], &[]),
    ];
    for (args, expected) in cases {
        assert_eq!(resulting_args(args, &[]), *expected, "{args:?}");
    }
}

#[test]
fn each_flag_is_reduced_to_one_value() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["--chart-name=x", "-chart-name", "y"], &["--chart-name=y"]),
        (&["--chart-name=x", "--chart-name="], &[]),
        (&["--watch-context=x", "--watch-context="], &[]),
        (&["--zap-devel="], &["--zap-devel="]),
        (
            &["--advertise=a,b", "--advertise", "c"],
            &["--advertise=a,b,c"],
        ),
    ];
    for (args, expected) in cases {
        assert_eq!(resulting_args(args, &[]), *expected, "{args:?}");
    }
}

#[test]
fn strongest_variable_overrides_flag_with_a_note() {
    let env = [
        ("SECOND", "b"),
        ("FIRST", "a"),
        ("LIST", "x,y"),
        ("RUNS", ""),
    ];
    let args = [
        "--chart-name=c",
        "--advertise=x",
        "--advertise=y",
        "--runs=1",
    ];
    let (argv, origins) = parse_environment(&args, &env);
    let expected = ["program", "--advertise=x,y", "--chart-name=a", "--runs=1"];
    assert_eq!(argv, expected);
    assert_eq!(
        origins.notes,
        ["variable FIRST overrides flag --chart-name"]
    );
    assert_eq!(origins.describe("chart-name"), "variable FIRST");
    assert_eq!(origins.describe("runs"), "flag --runs");
    assert_eq!(
        origins.describe("watch-context"),
        "default of --watch-context"
    );
}

#[test]
fn parse_error_names_origin_and_problem() {
    #[derive(Debug, clap::Parser)]
    struct Nothing {}
    let error = |args: &[&str], env: &[(&str, &str)]| {
        let (argv, origins) = parse_environment(args, env);
        parse::<Nothing>(command(), argv, &origins).unwrap_err()
    };
    let variable_error = error(&[], &[("RUNS", "65")]);
    assert_eq!(
        variable_error.to_string(),
        "error: variable RUNS: \"65\" is not a number from 1 to 64; write fewer\n"
    );
    assert_eq!(variable_error.exit_code(), 2);
    let text = error(&["-zap-devel=perhaps"], &[]).to_string();
    assert!(
        text.starts_with("error: flag --zap-devel: \"perhaps\" is not a bool"),
        "{text}"
    );
    for args in ["--chart-nam=x", "-chart-nam=x"] {
        let unknown = error(&[args], &[]);
        assert_eq!(unknown.exit_code(), 2);
        let text = unknown.to_string();
        assert!(
            text.contains("'--chart-nam'") && text.contains("'--chart-name'"),
            "{text}"
        );
    }
}

#[test]
fn flag_beats_a_variable_that_clap_reads() {
    let command = Command::new("program").arg(Arg::new("path").long("path").env("PATH"));
    let origin = |argv: &[&str]| {
        let argv: Vec<OsString> = argv.iter().map(OsString::from).collect();
        Origins::from_clap(&command, &argv).describe("path")
    };
    assert_eq!(origin(&["program"]), "variable PATH");
    assert_eq!(origin(&["program", "--path=a"]), "flag --path");
    assert_eq!(origin(&["program", "--path", "a"]), "flag --path");
}

#[test]
fn page_shows_each_flag_and_detects_change() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.md");
    std::fs::write(&page, "No generated part\n").unwrap();
    assert!(page::check(&page, &command()).is_err());
    let text = "\
# Flags

<!-- Generated by WRITE_DOCS=1 cargo test docs_ -->

## Options

| Flag | Variables | Default | Meaning |
| --- | --- | --- | --- |
| `--chart-name` | `FIRST`, `SECOND` | `a` | Name. |
| `--watch-context` |  | none | Context. |
| `--zap-devel` |  | `false` | . |
| `--advertise` | `LIST` |  | . |
| `--runs` | `RUNS` |  | . |

<!-- End of the generated part -->
Text.
";
    std::fs::write(&page, text).unwrap();
    page::check(&page, &command()).unwrap();
    let shorter = text.replace("| `--runs` | `RUNS` |  | . |\n", "");
    std::fs::write(&page, shorter).unwrap();
    if std::env::var_os("WRITE_DOCS").is_none() {
        assert!(page::check(&page, &command()).is_err());
    }
}
