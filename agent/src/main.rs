//! krypton-agent: installs one Helm chart for every Tenant of its cluster, as the hub specifies.

use std::process::ExitCode;

use krypton_agent::app::{Outside, run_in};
use krypton_agent::args::Flags;
use krypton_types::error_chain::chain;

fn main() -> ExitCode {
    // The supervisor process of one Helm run; see `krypton_helm::driver`.
    if std::env::args_os()
        .nth(1)
        .is_some_and(|first| first == "helm-run")
    {
        return krypton_helm::driver::supervise(std::env::args_os().skip(2));
    }
    let flags = match Flags::read(std::env::args_os()) {
        Ok(flags) => flags,
        Err(error) => error.exit(),
    };
    if rustls::crypto::aws_lc_rs::default_provider()
        .install_default()
        .is_err()
    {
        return exit_with("another TLS provider was installed before ours", 1);
    }
    let (log, _traces) = match flags.telemetry().start() {
        Ok(telemetry) => telemetry,
        Err(error) => return exit_with(&chain(&error), 2),
    };
    // One thread suffices for the agent's load, and each additional thread costs memory.
    let runtime = match tokio::runtime::Builder::new_current_thread()
        .max_blocking_threads(4)
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => return exit_with(&format!("starting the runtime failed: {error}"), 1),
    };
    let agent = async { run_in(flags, Outside::real(log)?).await };
    match runtime.block_on(agent) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit_with(&format!("{error:#}"), 1),
    }
}

fn exit_with(problem: &str, code: u8) -> ExitCode {
    eprintln!("krypton-agent: {problem}");
    ExitCode::from(code)
}
