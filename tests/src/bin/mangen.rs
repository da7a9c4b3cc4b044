//! Writes the man pages of all programs into a folder: `mangen FOLDER`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use clap::{Command, CommandFactory};
use krypton_agent::args::Flags;
use krypton_kubectl::Cli;

fn main() -> Result<()> {
    let folder = std::env::args_os().nth(1).context("no folder to write")?;
    let folder = PathBuf::from(folder);
    fs::create_dir_all(&folder)?;
    write_pages(&folder)?;
    println!("{}", folder.display());
    Ok(())
}

fn programs() -> [Command; 3] {
    [
        Cli::command(),
        krypton_hub::args::command(),
        Flags::command(),
    ]
}

/// Writes one page for each program and each of its commands.
fn write_pages(folder: &Path) -> Result<()> {
    for program in programs() {
        clap_mangen::generate_to(program, folder)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_page(command: &Command, folder: &Path) {
        let name = command
            .get_display_name()
            .unwrap_or_else(|| command.get_name());
        let page = fs::read_to_string(folder.join(format!("{name}.1"))).expect(name);
        // Pages escape hyphens.
        let page = page.replace("\\-", "-");
        for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
            let flag = arg.get_long().map(|long| format!("--{long}"));
            assert!(
                flag.is_none_or(|flag| page.contains(&flag)),
                "{name}: {arg}"
            );
        }
        for subcommand in command.get_subcommands().filter(|it| !it.is_hide_set()) {
            let listed = format!("{name}-{}(1)", subcommand.get_name());
            assert!(page.contains(&listed), "{listed}");
            check_page(subcommand, folder);
        }
    }

    #[test]
    fn man_pages_name_each_command_and_flag() {
        let folder = tempfile::tempdir().unwrap();
        write_pages(folder.path()).unwrap();
        for program in programs() {
            let mut program = program.disable_help_subcommand(true);
            program.build();
            check_page(&program, folder.path());
        }
    }
}
