package pgsieve.lake;

import io.delta.storage.S3SingleDriverLogStore;
import java.io.ByteArrayOutputStream;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.FileAlreadyExistsException;
import java.util.Arrays;
import java.util.Iterator;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FSDataOutputStreamBuilder;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.s3a.S3AFileSystem;
import org.apache.hadoop.fs.s3a.S3AUtils;
import org.apache.hadoop.fs.s3a.impl.PutObjectOptions;
import software.amazon.awssdk.core.exception.SdkException;
import software.amazon.awssdk.core.sync.RequestBody;
import software.amazon.awssdk.services.s3.model.PutObjectRequest;

/**
 * Commits to Delta tables on S3 that leave every other writer's commit whole.
 *
 * <p>A commit is one PUT with If-None-Match, which S3 takes only where no object has the name. Delta's own log store for
 * S3 looks whether there is one and then puts without a condition: it is safe among the threads of one driver only.
 *
 * <p>The answer to a PUT may be lost after S3 has stored the object. Then S3A or the SDK beneath it puts again, and S3
 * says that the name is taken: by this very commit. So what has the name is read, and is this commit where it has the
 * same bytes. No other writer's has: Delta gives each commit a random txnId. Without one (commitInfo can be turned
 * off) the name counts as taken by another.
 */
public class ConditionalPutLogStore extends S3SingleDriverLogStore {
    private static final String CONDITION = "fs.option.create.conditional.overwrite";
    private static final String UNIQUE = "\"txnId\":\"";

    public ConditionalPutLogStore(Configuration conf) {
        super(conf);
    }

    /**
     * Writes an object of these lines, all or nothing.
     *
     * @throws FileAlreadyExistsException where another writer has written one of this name, unless `overwrite`
     * @throws IOException where it is not written, or it is not known whether it is: never where it is known to be there
     */
    @Override
    public void write(Path path, Iterator<String> lines, Boolean overwrite, Configuration conf) throws IOException {
        if (overwrite) {
            super.write(path, lines, true, conf);
            return;
        }
        // Made before the stream is opened: closing one that has a part of them would write that part.
        byte[] content = joined(lines);
        FileSystem files = path.getFileSystem(conf);
        try {
            put(files, path, content);
        } catch (IOException failure) {
            if (!isThere(files, path, content, failure)) {
                throw failure;
            }
        }
    }

    private static byte[] joined(Iterator<String> lines) {
        ByteArrayOutputStream content = new ByteArrayOutputStream();
        while (lines.hasNext()) {
            content.writeBytes(lines.next().getBytes(StandardCharsets.UTF_8));
            content.write('\n');
        }
        return content.toByteArray();
    }

    private static void put(FileSystem files, Path path, byte[] content) throws IOException {
        FSDataOutputStreamBuilder<?, ?> builder = files.createFile(path);
        // A file system that does not know the condition refuses it, rather than write without.
        builder.create().overwrite(true).recursive().must(CONDITION, true);
        FSDataOutputStream stream;
        try {
            stream = (FSDataOutputStream) builder.build();
        } catch (IllegalArgumentException unknown) {
            if (!(files instanceof S3AFileSystem)) {
                throw unknown;
            }
            putByClient((S3AFileSystem) files, path, content);
            return;
        }
        try {
            stream.write(content);
        } catch (IOException | RuntimeException failure) {
            stream.abort();
            throw failure;
        }
        stream.close();
    }

    /** As `put`, where S3A has no such condition (before Hadoop 3.4.2): by its own client, which has. */
    private static void putByClient(S3AFileSystem files, Path path, byte[] content) throws IOException {
        String key = files.pathToKey(path);
        try {
            PutObjectRequest request = files.getRequestFactory()
                    .newPutObjectRequestBuilder(key, PutObjectOptions.keepingDirs(), content.length, false)
                    .ifNoneMatch("*")
                    .build();
            files.getS3AInternals().getAmazonS3Client(CONDITION).putObject(request, RequestBody.fromBytes(content));
        } catch (SdkException failure) {
            throw S3AUtils.translateException("PUT", path, failure);
        }
    }

    /** Whether the object is there and is this commit; raises FileAlreadyExistsException where it is another's. */
    private static boolean isThere(FileSystem files, Path path, byte[] content, IOException failure) throws IOException {
        byte[] stored = new byte[content.length];
        boolean same;
        try (FSDataInputStream stream = files.open(path)) {
            int length = stream.readNBytes(stored, 0, stored.length);
            same = length == content.length && stream.read() < 0 && Arrays.equals(stored, content);
        } catch (FileNotFoundException missing) {
            return false;
        } catch (IOException unreadable) {
            failure.addSuppressed(unreadable);
            return false;
        }
        if (same && isUnique(content)) {
            return true;
        }
        FileAlreadyExistsException taken = new FileAlreadyExistsException(path.toString());
        taken.initCause(failure);
        throw taken;
    }

    private static boolean isUnique(byte[] content) {
        return new String(content, StandardCharsets.UTF_8).contains(UNIQUE);
    }
}
