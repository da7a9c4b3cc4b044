//! krypton-agent: installs one Helm chart for every Tenant of its cluster, as the hub specifies.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;
use krypton_agent::args::Flags;
use krypton_runtime::telemetry::config::{TelemetryConfig, TellingError};
use krypton_types::error_chain::chain;

fn main() -> ExitCode {
    let mut args: Vec<OsString> = std::env::args_os().skip(1).collect();
    // The supervisor process of one Helm run; see `krypton_helm::driver`.
    if args.first().is_some_and(|first| first == "helm-run") {
        return krypton_helm::driver::supervise(args.drain(1..));
    }
    let flags = Flags::parse();
    if rustls::crypto::aws_lc_rs::default_provider()
        .install_default()
        .is_err()
    {
        return refuse("another TLS provider was installed before ours", 1);
    }
    let telling = flags.telling().map_err(TellingError::from);
    let (log, _traces) = match telling.and_then(TelemetryConfig::start) {
        Ok(started) => started,
        Err(error) => return refuse(&chain(&error), 2),
    };
    // One thread suffices for the agent's load, and each additional thread costs memory.
    let runtime = match tokio::runtime::Builder::new_current_thread()
        .max_blocking_threads(4)
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => return refuse(&format!("starting the runtime failed: {error}"), 1),
    };
    match runtime.block_on(krypton_agent::app::run(flags, log)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => refuse(&format!("{error:#}"), 1),
    }
}

fn refuse(problem: &str, code: u8) -> ExitCode {
    eprintln!("krypton-agent: {problem}");
    ExitCode::from(code)
}
