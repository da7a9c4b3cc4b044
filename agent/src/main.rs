//! krypton-agent: installs one Helm chart for every Tenant of its cluster, as the hub specifies.

use std::process::ExitCode;

use krypton_agent::app::{Outside, run_in};
use krypton_agent::args::Flags;
use krypton_agent::check;
use krypton_types::error_chain::chain;

fn main() -> ExitCode {
    let command = std::env::args_os().nth(1).unwrap_or_default();
    // The supervisor process of one Helm run; see `krypton_helm::driver`.
    if command == "helm-run" {
        return krypton_helm::driver::supervise(std::env::args_os().skip(2));
    }
    if rustls::crypto::aws_lc_rs::default_provider()
        .install_default()
        .is_err()
    {
        return exit_with("another TLS provider was installed before ours", 1);
    }
    // The pod of `helm test`.
    if command == "check" {
        let args = std::env::args_os().skip(2);
        let args: Vec<String> = args.map(|arg| arg.to_string_lossy().into_owned()).collect();
        return block_on(check::run(&args));
    }
    let flags = match Flags::read(std::env::args_os()) {
        Ok(flags) => flags,
        Err(error) => error.exit(),
    };
    let (log, _traces) = match flags.telemetry().start() {
        Ok(telemetry) => telemetry,
        Err(error) => return exit_with(&chain(&error), 2),
    };
    block_on(async { run_in(flags, Outside::real(log)?).await })
}

fn block_on(work: impl Future<Output = anyhow::Result<()>>) -> ExitCode {
    // One thread suffices for the agent's load, and each additional thread costs memory.
    let runtime = match tokio::runtime::Builder::new_current_thread()
        .max_blocking_threads(4)
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => return exit_with(&format!("starting the runtime failed: {error}"), 1),
    };
    match runtime.block_on(work) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit_with(&format!("{error:#}"), 1),
    }
}

fn exit_with(problem: &str, code: u8) -> ExitCode {
    eprintln!("krypton-agent: {problem}");
    ExitCode::from(code)
}
