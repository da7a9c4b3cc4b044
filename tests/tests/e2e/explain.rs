//! Shows that `kubectl krypton explain` reports the cause, the next step with its time, and silent members.

use anyhow::{Context, Result, bail};
use jiff::Timestamp;
use krypton_kubectl::ExitCode;
use krypton_tests::{
    Mode, Pair, Scenario, TestResult, by_agent, eventually,
    fleet::{FleetClient, HUB_NAMESPACE},
    membership::krypton_ends,
};
use serde_json::json;

by_agent!(explain_names_cause_retry_and_silent_reporter);

async fn explain_names_cause_retry_and_silent_reporter(mode: Mode) -> TestResult {
    let (mut pair, chart) = Scenario::new("explain", mode).start().await?;
    let before = Timestamp::now();
    chart.write("replicaCount: 0\nfailWith: because it must")?;
    // The Tenant on the home cluster shows the state of its namesake on the member.
    for fleet_client in [FleetClient::at(pair.home()), pair.fleet_client()] {
        fleet_client.create("acme", json!({})).await?;
    }
    let failed = shows(&pair, ExitCode::NotReady, "next: it is retried at ").await?;
    assert!(failed.contains("✗ InstallFailed: "), "{failed}");
    assert!(failed.contains("because it must"), "{failed}");
    let at = failed.split("retried at ").nth(1).unwrap();
    let (at, rest) = at.split_once(' ').unwrap();
    assert!(rest.starts_with("(in "), "{failed}");
    assert!(at.parse::<Timestamp>()? > before, "{failed}");

    chart.write("replicaCount: 0")?;
    let well = shows(&pair, ExitCode::Done, "✓ Installed: ").await?;
    assert!(!well.contains("next: "), "{well}");
    assert!(
        well.contains("✓ it has applied the current desired state "),
        "{well}"
    );

    pair.actor()?.kill9().await?;
    shows(&pair, ExitCode::NotReady, "no contact since 20").await?;
    Ok(())
}

/// Waits until the output contains this text and the command exits with this code. Returns the output.
async fn shows(pair: &Pair, code: ExitCode, text: &str) -> Result<String> {
    let tenant = ["explain", "tenant", "acme", "-n", "default"];
    let hub = ["--hub-namespace", HUB_NAMESPACE];
    let words = [tenant.as_slice(), &hub].concat();
    eventually(text, async || {
        let ran = krypton_ends(pair.home(), &words).await?;
        let ended = ran.status.code().context("it was killed")?;
        match ended == code as i32 && ran.stdout.contains(text) {
            true => Ok(Some(ran.stdout)),
            false => bail!("{ended}: {}{}", ran.stdout, ran.stderr),
        }
    })
    .await
}
