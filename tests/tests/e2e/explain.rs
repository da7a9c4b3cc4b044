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

    is_explained_from_report(&mut pair).await?;

    pair.actor()?.kill9().await?;
    shows(&pair, ExitCode::NotReady, "no contact since 20").await?;
    Ok(())
}

/// A Tenant that only the member has is listed and explained from the member's report.
async fn is_explained_from_report(pair: &mut Pair) -> TestResult {
    pair.fleet_client().create("local", json!({})).await?;
    let here = format!("--debug-address={}", pair.hub()?.debug_address());
    let explain = ["explain", "tenant", "local", "-n", "default"];
    let hub = ["--hub-namespace", HUB_NAMESPACE, "--on", pair.name(), &here];
    let explain = [explain.as_slice(), &hub].concat();
    let only = format!("✓ Tenant default/local exists only on {}", pair.name());
    eventually("the explanation of the member's Tenant", async || {
        let ran = krypton_ends(pair.home(), &explain).await?;
        let output = format!("{}{}", ran.stdout, ran.stderr);
        let expected = output.contains(&only) && output.contains("✓ Installed: ");
        match ran.status.success() && expected {
            true => Ok(Some(())),
            false => bail!("{output}"),
        }
    })
    .await?;
    let fleet = ["get", "tenants", "--fleet", "-n", "default", "--not-ready"];
    let ran = krypton_ends(pair.home(), &[&fleet[..5], &[&here]].concat()).await?;
    for name in ["acme", "local"] {
        let row = format!("{}   default     {name}", pair.name());
        assert!(ran.stdout.contains(&row), "{ran:?}");
    }
    let ran = krypton_ends(pair.home(), &[&fleet[..], &[&here]].concat()).await?;
    assert_eq!(ran.stderr, "No Tenants found\n", "{ran:?}");
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
