//! `kubectl krypton support-bundle`: writes one file for support, without secrets. It reads with the user's permissions.
//! If parts cannot be read, the command succeeds, and the file names them.

mod contents;
mod reader;
mod redaction;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::Args;
use jiff::Timestamp;

use crate::debug_port::parse_loopback_address;
use crate::error::KubectlError;
use crate::home::Target;
use crate::render::CommandOutput;
use contents::BundleContents;
#[cfg(test)]
pub(crate) use contents::tests::unpacked;
use reader::BundleReader;

const EXAMPLES: &str = "\
Examples:
  # Write a support bundle of this cluster into the current folder
  kubectl krypton support-bundle";

#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct SupportBundle {
    /// File to create; by default krypton-support-TIME.tar.gz in the current folder. An existing file is an error
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Additional debug ports
    #[arg(long, hide = true, value_name = "HOST:PORT", value_parser = parse_loopback_address)]
    debug_address: Vec<SocketAddr>,
}

pub(crate) async fn run(
    args: SupportBundle,
    target: &Target<'_>,
    now: Timestamp,
) -> Result<CommandOutput, KubectlError> {
    let cluster = target.connect().await?;
    let file = args.file.unwrap_or_else(|| {
        let time = now.strftime("%Y%m%dT%H%M%SZ");
        PathBuf::from(format!("krypton-support-{time}.tar.gz"))
    });
    // Before the command spends minutes on it.
    if file.exists() {
        let reason = format!("{} already exists; name another file", file.display());
        return Err(KubectlError::Refused(reason));
    }
    let named = [&target.args.hub_namespace, &target.args.namespace];
    let named: BTreeSet<String> = named.into_iter().flatten().cloned().collect();
    let namespaces = match named.is_empty() {
        true => cluster.program_namespaces(None),
        false => named.into_iter().collect(),
    };
    let reader = BundleReader::new(&cluster, now);
    let contents = reader.read_all(&namespaces, &args.debug_address).await?;
    let stderr = match contents.missing_count() {
        0 => String::new(),
        count => format!("{count} parts are missing; README.txt lists them with the reasons\n"),
    };
    write(&file, contents)?;
    let stdout = format!("{}\n", file.display());
    Ok(CommandOutput { stdout, stderr })
}

/// Writes the complete file or nothing, readable for its owner only. Never overwrites a file.
fn write(file: &Path, contents: BundleContents) -> Result<(), KubectlError> {
    let failed = |error: std::io::Error| {
        KubectlError::Failed(format!("writing {} failed: {error}", file.display()))
    };
    let folder = match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let temporary = tempfile::NamedTempFile::new_in(folder).map_err(failed)?;
    contents.write(temporary.as_file()).map_err(failed)?;
    let persisted = temporary.persist_noclobber(file);
    persisted.map_err(|error| failed(error.error))?;
    Ok(())
}
