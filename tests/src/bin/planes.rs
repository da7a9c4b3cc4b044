//! Runs a command that starts tests, with a pool of control planes for them: `planes COMMAND [ARGUMENTS...]`.

use std::process::ExitCode;

use anyhow::{Context, Result};
use krypton_tests::{Tools, planes};

#[tokio::main]
async fn main() -> Result<ExitCode> {
    krypton_tests::install_tls_provider();
    let mut command = std::env::args_os().skip(1);
    let program = command.next().context("no command to run")?;
    let folder = tempfile::tempdir()?;
    let socket = folder.path().join("planes");
    #[expect(clippy::disallowed_methods, reason = "running the tests")]
    let mut tests = tokio::process::Command::new(program)
        .args(command)
        .env("KRYPTON_PLANES", &socket)
        // Each test is a process, and would run a script of ten processes to find them.
        .env("KRYPTON_TOOLS", Tools::find()?.root())
        .spawn()?;
    let status = tokio::select! {
        ended = tests.wait() => ended?,
        served = planes::serve(&socket) => match served? {},
    };
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(ExitCode::from(code.unwrap_or(1)))
}
