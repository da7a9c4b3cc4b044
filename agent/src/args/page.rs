//! `docs/reference/agent-flags.md`, which is made of the flags themselves.

use std::fmt::Write;
use std::path::Path;

use clap::CommandFactory;

use super::Flags;

const PREFACE: &str = "\
# Flags and variables of krypton-agent

<!-- Rendered from agent/src/args.rs. Write it anew with: WRITE_DOCS=1 cargo test -p krypton-agent docs_agent_flags -->

What counts, the strongest first: the flag, its variable, the default. Durations are Go durations (`180s`, `3m`, `1h30m`).
Wrong usage ends with status 2. What the agent's chart has a value for is in its
[README](../../charts/krypton-agent/README.md); any other flag goes into `extraArgs`, any other variable into `extraEnvs`.
";

/// Variables that no flag is for.
const VARIABLES: [(&str, &str, &str); 5] = [
    (
        "`KUBECONFIG`",
        "",
        "Kubeconfig of the cluster, where `--kubeconfig` is not given",
    ),
    (
        "`POD_NAMESPACE`, `POD_NAME`, `HOSTNAME`",
        "",
        "What `--namespace` and `--replica` are where they are not given",
    ),
    (
        "`POD_UID`",
        "",
        "The pod that it runs in: the next container of the same pod takes the Lease at once",
    ),
    (
        "`PATH`, `SSL_CERT_FILE`, `SSL_CERT_DIR`",
        "",
        "Passed on to helm, and nothing else of the environment is",
    ),
    ("`RUST_LOG`", "`info`", "Log filter, as `info,kube=debug`"),
];

fn row(cells: &[&str]) -> String {
    let cells: Vec<String> = cells
        .iter()
        .map(|cell| cell.replace('|', "\\|").replace('\n', " "))
        .collect();
    format!("| {} |\n", cells.join(" | "))
}

fn markdown() -> String {
    let mut page = PREFACE.to_owned();
    let mut heading = "";
    let command = Flags::command();
    for arg in command.get_arguments() {
        let Some(long) = arg.get_long() else { continue };
        let (Some(of), Some(help)) = (arg.get_help_heading(), arg.get_help()) else {
            continue;
        };
        if of != heading {
            heading = of;
            let head = "| flag | variable | default | meaning |\n| --- | --- | --- | --- |\n";
            write!(page, "\n## {of}\n\n{head}").unwrap();
        }
        let variable = arg.get_env().map(|name| format!("`{}`", name.display()));
        let default: Vec<String> = arg
            .get_default_values()
            .iter()
            .map(|value| format!("`{}`", value.display()))
            .collect();
        // What is told in words stands at the end of the help.
        let help = help.to_string();
        let (help, told) = help
            .trim_end_matches('.')
            .strip_suffix(']')
            .and_then(|help| help.split_once(" [default: "))
            .unwrap_or((help.trim_end_matches('.'), ""));
        let default = format!("{}{told}", default.join(" "));
        let flag = format!("`--{long}`");
        let variable = variable.unwrap_or_default();
        page += &row(&[&flag, &variable, &default, &format!("{help}.")]);
    }
    page +=
        "\n## Variables without a flag\n\n| variable | default | meaning |\n| --- | --- | --- |\n";
    for (names, default, meaning) in VARIABLES {
        page += &row(&[names, default, &format!("{meaning}.")]);
    }
    page
}

#[test]
fn docs_agent_flags_page_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/agent-flags.md");
    let expected = markdown();
    if std::env::var_os("WRITE_DOCS").is_some() {
        std::fs::write(&path, &expected).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == expected,
        "docs/reference/agent-flags.md is stale; write it with: WRITE_DOCS=1 cargo test -p krypton-agent docs_agent_flags"
    );
}

#[test]
fn each_flag_is_told_of() {
    let page = markdown();
    let command = Flags::command();
    let flags = command.get_arguments().filter_map(clap::Arg::get_long);
    let mut seen = 0;
    for flag in flags.filter(|long| !matches!(*long, "help" | "version")) {
        assert!(page.contains(&format!("| `--{flag}` |")), "{flag}");
        seen += 1;
    }
    assert!(seen > 20, "{seen}");
}
